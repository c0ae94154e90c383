"""Checkpoints that are written while training goes on.

Values are copied to the host's memory first. Then a thread of each rank writes its own
to disk and tells rank 0 by the store of the process group, which no collective waits
for; the thread of rank 0 finishes, and tells the others how that went.
"""

from __future__ import annotations

import atexit
import itertools
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from autopar.checkpoints.dcp import CheckpointError, State
from autopar.passes.errors import AutoparError
from autopar.runtime.agreement.fail_together import agreed, outcome_of
from autopar.runtime.comm.comm import Comm

T = TypeVar("T")
PAUSE = 0.05  # seconds between looks into the store
PATIENCE = 1800.0  # seconds that ranks may write longer than others
_numbers = itertools.count()  # of saves; alike on all ranks, which save together


def in_memory(state: State) -> State:
    """Returns a copy, in the host's memory, of what this rank writes of a state."""
    return {
        key: value
        if isinstance(value, bytes)
        else [
            replace(piece, values=piece.values.detach().to("cpu", copy=True))
            if piece.written
            else piece
            for piece in value
        ]
        for key, value in state.items()
    }


class PendingSave(Generic[T]):
    """A checkpoint that is being written.

    write: this rank's part, without a word to others. finish: on rank 0, once all ranks
    have written. held: is let go of when that is done.
    """

    def __init__(
        self,
        comm: Comm,
        write: Callable[[], T],
        finish: Callable[[list[T]], Path],
        held: ExitStack,
    ) -> None:
        self._write, self._finish, self._held = write, finish, held
        self._rank, self._ranks = comm.rank, comm.mesh.size
        self._store, self._key = _store(self._ranks), f"autopar/save/{next(_numbers)}"
        self._outcome: tuple[Path | None, AutoparError | None] = None, None
        self._thread = Thread(target=self._work, daemon=True, name="autopar save")
        self._thread.start()
        atexit.register(self._at_exit)

    def done(self) -> bool:
        """Whether it was written, or failed."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until it is written; returns the path of the checkpoint.

        timeout: seconds. Raises: CheckpointError or AutoparError, on all ranks the
        same, if it could not be written; TimeoutError.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the checkpoint is still being written ({timeout} s)")
        atexit.unregister(self._at_exit)
        self._held.close()
        path, error = self._outcome
        if error is not None:
            raise error
        assert path is not None, "the thread has ended"
        return path

    def _work(self) -> None:
        try:
            own = outcome_of(self._write)
            if self._rank:
                self._tell(str(self._rank), own)
                self._outcome = self._told("all")
                return
            others = [self._told(str(rank)) for rank in range(1, self._ranks)]
            written = [own, *others]
            self._outcome = outcome_of(
                lambda: self._finish([agreed(one) for one in written])
            )
            if self._ranks > 1:
                self._tell("all", self._outcome)
        except RuntimeError as error:  # the store is gone, and with it other ranks
            failed = CheckpointError(
                f"nobody knows whether all ranks wrote their part: {error}",
                fix="go on from the newest complete checkpoint",
            )
            self._outcome = None, failed

    def _tell(self, who: str, outcome: tuple[Any, AutoparError | None]) -> None:
        self._store.set(f"{self._key}/{who}", pickle.dumps(outcome))

    def _told(self, who: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not self._store.check([f"{self._key}/{who}"]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no word of '{who}' for {PATIENCE:.0f} s")
            time.sleep(PAUSE)
        return pickle.loads(self._store.get(f"{self._key}/{who}"))

    def _at_exit(self) -> None:
        """Finish before the process ends, unless it ends by an error: then other ranks
        may never write their part."""
        if getattr(sys, "last_value", None) is None:
            self._thread.join()
            self._held.close()


def _store(ranks: int) -> Any:
    """A store for threads of ranks, on a connection of its own."""
    if ranks == 1:
        return None
    if not dist.is_initialized():
        raise CheckpointError(
            "ranks within one process cannot save asynchronously",
            fix="save without asynchronous=True",
        )
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store().clone()
