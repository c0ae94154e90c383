"""Ranks that a plan has no use for: they wait until the others are done."""

from __future__ import annotations

import time

import torch.distributed as dist

OVER, SEEN = "autopar/over", "autopar/over seen"  # keys of a run's store
PAUSE = 0.5  # seconds between looks


def await_end(store: dist.Store) -> None:
    """Wait as a spare rank; awake now and then, for signals."""
    while not store.check([OVER]):
        time.sleep(PAUSE)
    store.add(SEEN, 1)


def end_spares(store: dist.Store, rank: int, spares: int) -> None:
    """Let spare ranks end, on all others; rank 0, whose the store may be, after them.

    One that dies instead is told by the run's watchdog.
    """
    if rank == 0 and spares:
        store.set(OVER, "")
        while store.add(SEEN, 0) < spares:
            time.sleep(PAUSE)
