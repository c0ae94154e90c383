"""Before there is a step to call the roll of: whether all ranks compile.

Ranks tell it in the store of the process group, which takes no collective: others may
be in one of the user's own.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from autopar.runtime.agreement.roll_call import RanksDisagree, ranks_text

LATE = 30.0  # seconds; a rank that waits so long says so, and goes on
PAUSE = 0.01, 0.25  # between looks: at first, and at most
LOG = logging.getLogger("autopar")
_BEFORE: Counter[str] = Counter()  # how often all have been there, by the call


def await_all(
    store: dist.Store, rank: int, world: int, call: str, timeout: timedelta
) -> None:
    """Wait until each rank has come to a call, as `autopar.compile()`.

    Raises: RanksDisagree, after the timeout.
    """
    began, late, pause = time.monotonic(), False, PAUSE[0]
    keys = [f"autopar/{call}/{_BEFORE[call]}/{r}" for r in range(world)]
    store.set(keys[rank], "here")
    while not store.check(keys):
        waited = time.monotonic() - began
        away = [r for r, key in enumerate(keys) if not store.check([key])]
        if away and waited > timeout.total_seconds():
            here = [r for r in range(world) if r not in away]
            raise RanksDisagree(
                f"{ranks_text(here)} called {call}, but {ranks_text(away)} did not "
                f"within {waited:.0f} s",
                fix=f"call {call} on all ranks, and not within `if rank == 0`; where "
                "they take longer to get there, give compile a longer timeout=",
            )
        if away and waited > LATE and not late:
            late = True
            LOG.warning(
                "rank %d has waited in %s for %.0f s: %s did not call it yet. All "
                "ranks must, not only one within `if rank == 0`",
                rank, call, waited, ranks_text(away),
            )  # fmt: skip
        time.sleep(pause)
        pause = min(2 * pause, PAUSE[1])
    _BEFORE[call] += 1
