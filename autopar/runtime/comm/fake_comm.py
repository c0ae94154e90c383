"""A rank without others: what they would send is made of what it has itself.

For measuring what a rank computes, where messages are measured apart: shapes are those
of the mesh, values are finite and of no meaning, and nothing is waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.passes.mesh import Mesh
from autopar.passes.shard.layout import extent
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.work import Arrived, Work


class FakeComm(Comm):
    """A rank of a mesh, the first if not told; every other one has the same as it."""

    def __init__(
        self, mesh: Mesh, microbatches: int, device: torch.device, rank: int = 0
    ) -> None:
        super().__init__(mesh, rank, microbatches, device)

    def flush(self) -> None:
        """Does nothing: all that was sent is gone."""

    def gather_object(self, value: Any) -> list[Any]:
        return [value] * self.mesh.size

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value

    def route(
        self, expert: Tensor, axis: str, experts: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows choose among the first rank's experts, so that it works on as many as
        leave it."""
        mine = extent(self.layout(experts, axis)[0])
        _, order, counts = super().route(expert, axis, experts)
        return expert.index_select(0, order).remainder(mine), order, counts

    def _start_reduce_(self, x: Tensor, ranks: tuple[int, ...], op: str) -> Work:
        """Leaves x as it is: sums over many ranks would grow without bounds."""
        return Arrived(x)

    def _shift(self, x: Tensor, ranks: tuple[int, ...], numel: int) -> Work:
        return self._start_exchange(x, [], [numel], ranks)

    def _start_gather(self, rows: Tensor, ranks: tuple[int, ...]) -> Work:
        rows.copy_(rows[0].expand_as(rows).clone())
        return Arrived(rows)

    def _start_exchange(
        self, x: Tensor, sent: list[int], counts: list[int], ranks: tuple[int, ...]
    ) -> Work:
        out = x.new_zeros(sum(counts))
        amount = min(len(out), len(x))
        out[:amount] = x[:amount]
        return Arrived(out)

    def _send(self, x: Tensor, to_rank: int, tag: int) -> Work:
        return Arrived(x)

    def _recv(self, x: Tensor, from_rank: int, tag: int) -> Work:
        return Arrived(x.zero_())
