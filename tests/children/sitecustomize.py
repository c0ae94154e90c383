"""What Python runs first in processes that tests start: it looks for cycles seldom, and
not at its end, which takes a third of a process that trains a little model."""

import atexit
import gc

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)  # the first to be registered is the last to run
