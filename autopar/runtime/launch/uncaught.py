"""A user's script: an error that it does not catch on one rank ends all of them, soon.

The rank that it began on shows its traceback, as ever. The others fail because of it,
by a message that never comes, or would wait for hours: they say which rank it was.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from weakref import ref

import torch.distributed as dist

from autopar.runtime.launch.errors_of_ranks import of_communication, record
from autopar.runtime.launch.watchdog import BEAT, Watchdog

# Seconds for which a rank that failed is still there. torchrun ends the others as soon
# as one has: they hear of it first. And of ranks that fail in the same second it takes
# the first for the cause: who fails because of another one ends after it.
HEARD = 2 * BEAT

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_watched: ref[dist.ProcessGroup] | None = None


def watch() -> None:
    """Watches the ranks of the default process group; to be called on all."""
    global _watched
    group, at_work = dist.group.WORLD, Watchdog.at_work
    assert group is not None, "it has several ranks"
    if at_work is not None and at_work.to_the_end:
        return
    if _watched is None:
        sys.excepthook = partial(_uncaught, sys.excepthook)
    elif _watched() is group:
        return
    if at_work is not None:  # of a group that was destroyed
        at_work.stop()
    _watched = ref(group)
    store, rank, world = group.get_group_store(), dist.get_rank(), dist.get_world_size()
    Watchdog(store, rank, world, to_the_end=False).start()


def leave() -> None:
    """Tell the other ranks, if they are watched, that this one came to its end."""
    at_work = Watchdog.at_work
    if at_work is not None and not at_work.to_the_end:
        at_work.note_left()
        at_work.stop()


def _uncaught(
    before: Hook,
    kind: type[BaseException],
    error: BaseException,
    where: TracebackType | None,
) -> None:
    """Show an error, or what it comes from on another rank. before: the hook that was
    there, which may be a debugger's: the others wait for it."""
    watchdog, may_be_theirs = Watchdog.at_work, of_communication(error)
    if watchdog is None or not may_be_theirs:
        before(kind, error, where)
    if watchdog is None:
        return
    message = watchdog.cause(error)
    if may_be_theirs and message in (None, watchdog.left()):
        before(kind, error, where)  # it says where this rank waited
    if message is not None:
        watchdog.complain(message)
    else:
        record(error, where)
        watchdog.stop()  # the others end, and torchrun ends this one, if need be
    time.sleep(HEARD)
