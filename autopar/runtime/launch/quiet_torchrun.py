"""`torchrun` for our own commands, whose ranks say themselves what failed, and once."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import threading
import time

from autopar.gc_paused import gc_paused
from autopar.progress import Progress, tell

with gc_paused(), Progress("torchrun"):
    tell("importing torch")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

PAUSE = 0.5  # seconds
LATE = "fewer came in time than --nodes says"  # torch has no words for it


def main() -> None:
    """Runs torchrun, but an end that was asked for, or that ranks told of, is no error
    of the launcher: there is a status instead of a traceback."""
    logging.disable(logging.ERROR)
    atexit.register(gc.freeze)  # or Python's end looks at all of torch for cycles
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    try:
        run.main()
    except SignalException as asked:
        sys.exit(128 + asked.sigval)
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        # As shells have it, for a rank that was killed.
        sys.exit(128 - first.exitcode if first.exitcode < 0 else first.exitcode)
    except RendezvousError as error:
        sys.exit(
            f"autopar: this node did not meet the others: {str(error) or LATE}\n"
            "  fix  start the same command on each node, with a longer --timeout if "
            "they need it; the node of --rendezvous has to live as long as the run"
        )


def _end_with(starter: int) -> None:
    """Ends this process, which has a session of its own, once its starter is gone."""
    while os.getppid() == starter:
        time.sleep(PAUSE)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
