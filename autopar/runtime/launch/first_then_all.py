"""Work that may take hours once, and nothing after: rank 0 first, then the others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

WAIT = timedelta(days=7)  # the run's watchdog ends those that wait for a dead rank
FIRST, ALL = "autopar/first did", "autopar/all did"  # keys of a run's store


def first_then_all(
    store: dist.Store, rank: int, world: int, work: Callable[[], object]
) -> None:
    """Rank 0 works, then the others, and none goes on before all have.

    So what rank 0 leaves on a disk is found by all that share it, and made again by
    those that do not. No collective waits for it, whose time is short.
    """
    if rank > 0:
        store.wait([FIRST], WAIT)
    work()
    if rank == 0:
        store.set(FIRST, "")
    if store.add(f"{ALL}/count", 1) == world:
        store.set(ALL, "")
    store.wait([ALL], WAIT)
