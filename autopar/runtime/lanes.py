"""Lanes: process groups of two ranks for messages that NCCL carries, one a direction.

NCCL knows no tags: it runs what a communicator carries one after the other, in the
order of the calls. So two ranks that both send before they receive need a communicator
for each direction. And the first call that needs a communicator makes it, and returns
only once the other rank has made that call too: two ranks that begin by getting ready
for what the other one sends later would wait for each other. So all are made at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

Lanes = WeakValueDictionary[tuple[int, int], dist.ProcessGroup]


def open_lanes(
    rank: int,
    pairs: Iterable[tuple[int, int]],
    device: torch.device,
    timeout: timedelta | None,
) -> Lanes:
    """The lanes that this rank is in, by (sender, receiver), ready for use.

    All ranks must call it with the same pairs. Each lane carries one number, lane by
    lane in an order that all ranks share: both ranks of the first lane that is not yet
    open are done with those before it, so none waits for ever.
    """
    lanes: Lanes = WeakValueDictionary()
    for pair in sorted(set(pairs)):
        group = dist.new_group(list(pair), timeout=timeout)
        if rank in pair:
            lanes[pair] = group
    x = torch.zeros(1, device=device)
    for (sender, receiver), lane in lanes.items():
        if rank == sender:
            dist.send(x, receiver, lane)
        else:
            dist.recv(x, sender, lane)
    return lanes
