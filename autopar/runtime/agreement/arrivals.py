"""Tells whether all ranks compile, before there is a step to call the roll of.

Ranks tell it in the store of the process group, which takes no collective: others may
be in one of the user's own.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch.distributed as dist

from autopar.runtime.agreement.roll_call import RanksDisagree, ranks_text

LATE = 30.0  # seconds; a rank that waits so long says so, and goes on
PAUSE = 0.01, 0.25  # between looks: at first, and at most
LOG = logging.getLogger("autopar")
_BEFORE: Counter[str] = Counter()  # how often all have been there, by the call


FIX = (
    "call {call} on all ranks, and not within `if rank == 0`; where they take longer "
    "to get there, give compile a longer timeout="
)


def await_all(
    store: dist.Store,
    rank: int,
    world: int,
    call: str,
    timeout: timedelta,
    *,
    fix: str = FIX,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Wait until each rank has come to a call, as `autopar.compile()`.

    fix: for ranks that do not come. meanwhile: done as often as is looked for them.
    Raises: RanksDisagree, after the timeout.
    """
    keys = {r: f"autopar/{call}/{_BEFORE[call]}/{r}" for r in range(world)}
    store.set(keys[rank], "here")
    await_keys(store, keys, rank, call, timeout, fix, meanwhile)
    _BEFORE[call] += 1


def await_keys(
    store: dist.Store,
    keys: Mapping[int, str],
    rank: int,
    call: str,
    timeout: timedelta,
    fix: str = FIX,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Wait until each rank that has a key has set it; rank: this one. As above."""
    began, late, pause = time.monotonic(), False, PAUSE[0]
    while away := _away(store, keys, rank, call):
        if meanwhile is not None:
            meanwhile()
        waited = time.monotonic() - began
        if waited > timeout.total_seconds():
            here = sorted({rank, *keys} - set(away))
            raise RanksDisagree(
                f"{ranks_text(here)} called {call}, but {ranks_text(away)} did not "
                f"within {waited:.0f} s",
                fix=fix.format(call=call),
            )
        if waited > LATE and not late:
            late = True
            LOG.warning(
                "rank %d has waited in %s for %.0f s: %s did not call it yet. All "
                "ranks must, not only one within `if rank == 0`",
                rank, call, waited, ranks_text(away),
            )  # fmt: skip
        time.sleep(pause)
        pause = min(2 * pause, PAUSE[1])


def _away(
    store: dist.Store, keys: Mapping[int, str], rank: int, call: str
) -> list[int]:
    """The ranks that did not set their key. Raises: RanksDisagree without a store."""
    try:
        if store.check([*keys.values()]):
            return []
        return [r for r, key in keys.items() if not store.check([key])]
    except RuntimeError as error:
        raise RanksDisagree(
            f"rank {rank} waited in {call} for others, and who kept the store where "
            "they meet is gone",
            fix="see what rank 0, or its torchrun, said",
        ) from error
