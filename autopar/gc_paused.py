"""Garbage collection is paused for work that makes many objects and hardly a cycle.

Imports, captures and passes build millions of small objects that stay. Each time that
their number has grown by a quarter Python looks at all of them for cycles, which takes
a sixth of the time and finds next to nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keeps Python from collecting cycles, as a context or a decorator."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                # What was made is old now, and not looked at first thing.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
