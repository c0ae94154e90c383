"""Messages between pipeline stages as calls of one communicator, in turn.

NCCL runs what a communicator carries one after the other, so all ranks begin their
messages in one order, and those of two ranks to each other together: see
`passes.schedule.exchanges`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.passes.mesh import PIPELINE, Mesh

# dist.isend or dist.irecv, a tensor, the other rank, a tag
Message = tuple[Callable[..., Any], Tensor, int, int]


class PointToPoint:
    """A group for the stages of each pipeline, whose collectives have their own.

    Construct it on all ranks. It belongs to torch.distributed, as all groups do.
    """

    def __init__(
        self, mesh: Mesh, rank: int, device: torch.device, timeout: timedelta | None
    ) -> None:
        self._group: ref[dist.ProcessGroup] | None = None
        lines = mesh.groups((PIPELINE,))
        for ranks in sorted(line for line in lines if len(line) > 1):
            group = dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                mine, self._group = group, ref(group)
        if self._group is not None:
            # NCCL makes a communicator by the first call, which all ranks must make.
            dist.all_reduce(torch.zeros(1, device=device), group=mine)

    def start(self, messages: Sequence[Message]) -> list[dist.Work] | None:
        """Begin messages together: a work for each. None if no group has the ranks."""
        group = self._group and self._group()
        if group is None:
            return None
        known = dist.get_process_group_ranks(group)
        if not {peer for _, _, peer, _ in messages} <= set(known):
            return None
        ops = [dist.P2POp(call, x, peer, group, tag) for call, x, peer, tag in messages]
        works = dist.batch_isend_irecv(ops) if ops else []
        # NCCL's are one.
        return works if len(works) == len(ops) else works * len(ops)
