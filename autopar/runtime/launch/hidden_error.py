"""An error that a rank cannot show: its script handles it, as `finally:` does, by a
collective that the others never call, for they are in a step and wait for this rank."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

import torch.distributed as dist

from autopar.runtime.agreement.roll_call import RollCall

LATE = 20.0  # seconds; others may only be slow before that
WAITING = "autopar/waiting"  # how many ranks wait for others in an operation


class HiddenError:
    """Looks for one, each time that it is asked; on each rank, in a thread beside the
    one that computes."""

    def __init__(self) -> None:
        self._operation: object | None = None
        self._waits = False
        self._error: BaseException | None = None
        self._since = 0.0

    def look(self, store: dist.Store) -> BaseException | None:
        """Tells the others whether this rank waits for them, and returns the error that
        it handles while one of them has waited for it, for too long."""
        operation = RollCall.under_way
        waits = operation is not None and operation is self._operation
        self._operation = operation
        if waits != self._waits:
            store.add(WAITING, 1 if waits else -1)
            self._waits = waits
        error, now = handled_in_a_collective(), time.monotonic()
        if error is not self._error or (error and store.add(WAITING, 0) == 0):
            self._error, self._since = error, now
        return error if error and now - self._since > LATE else None


def handled_in_a_collective() -> BaseException | None:
    """The exception that the main thread handles while it is in a call of
    torch.distributed, but not of ours."""
    main = threading.main_thread().ident
    if main is None or (active := sys._current_exceptions().get(main)) is None:
        return None
    frame: FrameType | None = sys._current_frames().get(main)
    in_collective = False
    while frame is not None:
        package, _, rest = frame.f_globals.get("__name__", "").partition(".")
        if package == "autopar":
            return None
        in_collective |= package == "torch" and rest.startswith("distributed.")
        frame = frame.f_back
    error = active[1] if isinstance(active, tuple) else active  # before Python 3.12
    return error if in_collective else None
