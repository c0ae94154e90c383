"""Where a rank lies on the mesh, and what follows from that without a message.

A dim is split over axes by `passes.mesh.balanced`, outermost axis first. "My share" is
the part that belongs to this rank's coordinate. `...` in a shape is any number of dims.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar import kernels
from passes.mesh import TIME, Mesh, start


class Placement:
    """One rank's place on the mesh and in time, and its share of tensors.

    The executor sets `microbatch`, the coordinate on the axis "time", before it runs
    a forward or a backward.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        microbatches: int,
        device: torch.device,
    ) -> None:
        self.mesh = mesh
        self.device = device
        self.rank = rank
        self.coords = mesh.coords(rank)
        self.microbatches = microbatches
        self.microbatch = 0
        self.key = 0  # of all dropout masks of this step
        self.evaluating = False
        self._ranks: dict[tuple[str, ...], tuple[int, ...]] = {}

    def ranks(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from this one on these axes only, ascending."""
        if axes not in self._ranks:
            self._ranks[axes] = self.mesh.group(self.rank, axes)
        return self._ranks[axes]

    def span(self, extent: int, axes: tuple[str, ...]) -> tuple[int, int]:
        """Where my shard begins and how long it is, in a dim of global `extent` that is
        split by `axes`, outermost first; "time" may be one of them."""
        begin = 0
        for axis in axes:
            if axis == TIME:
                parts, i = self.microbatches, self.microbatch
            elif axis in self.coords:
                parts, i = len(self.ranks((axis,))), self.coords[axis]
            else:
                parts, i = self.mesh.axis_size(axis), 0
            first = start(extent, parts, i)
            begin += first
            extent = start(extent, parts, i + 1) - first
        return begin, extent

    def start(self, extent: int, axes: tuple[str, ...]) -> int:
        """Where my shard begins: see `span`."""
        return self.span(extent, axes)[0]

    def extent(self, extent: int, axes: tuple[str, ...]) -> int:
        """How long my shard is: see `span`."""
        return self.span(extent, axes)[1]

    def shard(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """A view of my share of x along dim; nothing is sent. `axis` may be "time"."""
        return x.narrow(dim, *self.span(x.shape[dim], (axis,)))

    def pad(self, x: Tensor, axis: str, dim: int, extent: int) -> Tensor:
        """The transpose of `shard`: x in its place along dim, zeros around it."""
        shape = list(x.shape)
        shape[dim] = extent
        whole = x.new_zeros(shape)
        whole.narrow(dim, *self.span(extent, (axis,))).copy_(x)
        return whole

    def dropout_mask(
        self,
        p: float,
        number: int,
        position: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...],
    ) -> Tensor | None:
        """What dropout `number` of the model keeps of my part of a tensor, as bool.

        position: for each dim, its factors: (global extent, axes that split it).
        None while evaluating: there is no dropout then.
        """
        if self.evaluating:
            return None
        dims = [
            [(extent, *self.span(extent, axes)) for extent, axes in factors]
            for factors in position
        ]
        return kernels.dropout_mask(p, self.key, number, dims, self.device)

    def causal_mask(
        self, position: tuple[tuple[int, tuple[str, ...]], ...], columns: int
    ) -> Tensor:
        """Which keys my rows of a sequence may see: bool [my rows, columns].

        position: the factors of the dim of rows: (global extent, axes that split it).
        """
        rows = torch.zeros(1, dtype=torch.int64, device=self.device)
        for extent, axes in position:
            start, length = self.span(extent, axes)
            mine = torch.arange(start, start + length, device=self.device)
            rows = (rows[:, None] * extent + mine).flatten()
        return rows[:, None] >= torch.arange(columns, device=self.device)

    # Rows and entries of a sharded dim. Indices are global and int64; sizes are those
    # of the dim before it was split. What lies in no shard counts as zero everywhere.

    def lookup(
        self, weight: Tensor, ids: Tensor, extent: int, axes: tuple[str, ...]
    ) -> Tensor:
        """weight [my rows, width], ids [...] -> [..., width], a pending sum over axes:
        rows that are not in my shard are zeros."""
        begin, length = self.span(extent, axes)
        if length == extent:
            return F.embedding(ids, weight)
        if not length:
            return weight.new_zeros(*ids.shape, weight.shape[1])
        local, outside = _local(ids, begin, length)
        return F.embedding(local, weight).masked_fill_(outside.unsqueeze(-1), 0)

    def lookup_grad_(
        self,
        grad: Tensor,
        dy: Tensor,
        ids: Tensor,
        extent: int,
        axes: tuple[str, ...],
        padding: int | None = None,
    ) -> Tensor:
        """Add the gradient of `lookup` into grad [my rows, width]: dy [..., width].

        Row `padding` of the whole table, where given, gets nothing.
        """
        begin, length = self.span(extent, axes)
        if not length:
            return grad
        if padding is not None:
            ids = ids.masked_fill(ids == padding, -1)
        if length != extent or padding is not None:
            ids, outside = _local(ids, begin, length)
            dy = dy.masked_fill(outside.unsqueeze(-1), 0)
        return kernels.embedding_grad_(grad, dy, ids)

    def pick(
        self, x: Tensor, index: Tensor, extent: int, axes: tuple[str, ...]
    ) -> Tensor:
        """x [..., my extent], index [...] -> x[..., index] [...], a pending sum over
        axes. An index such as -100 picks zero on every rank."""
        begin, length = self.span(extent, axes)
        if not length:
            return x.new_zeros(index.shape)
        local, outside = _local(index, begin, length)
        picked = x.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        return picked.masked_fill_(outside, 0)

    def pick_backward(
        self, dy: Tensor, index: Tensor, extent: int, axes: tuple[str, ...]
    ) -> Tensor:
        """dy [...], index [...] -> dx [..., my extent]."""
        dx = dy.new_zeros(*index.shape, self.extent(extent, axes))
        return self.pick_backward_add_(dx, dy, index, extent, axes)

    def pick_backward_add_(
        self,
        buffer: Tensor,
        dy: Tensor,
        index: Tensor,
        extent: int,
        axes: tuple[str, ...],
    ) -> Tensor:
        """Add `pick_backward` into buffer [..., my extent], of dy's dtype."""
        begin, length = self.span(extent, axes)
        if not length:
            return buffer
        local, outside = _local(index, begin, length)
        return buffer.scatter_add_(
            -1, local.unsqueeze(-1), dy.masked_fill(outside, 0).unsqueeze(-1)
        )

    # Experts, of which each rank of an axis may hold some.

    def expert_linear(
        self,
        x: Tensor,
        expert: Tensor,
        weight: Tensor,
        experts: int,
        axes: tuple[str, ...],
    ) -> Tensor:
        """x [rows, k], expert [rows], weight [my experts, n, k] -> x weight[expert]^T
        [rows, n], a pending sum over axes: zeros in rows of others' experts."""
        begin = self.start(experts, axes)
        return kernels.expert_linear(x, expert - begin, weight.mT)

    def expert_linear_transposed(
        self,
        dy: Tensor,
        expert: Tensor,
        weight: Tensor,
        experts: int,
        axes: tuple[str, ...],
    ) -> Tensor:
        """The gradient of `expert_linear` for x: dy [rows, n] -> [rows, k]."""
        begin = self.start(experts, axes)
        return kernels.expert_linear(dy, expert - begin, weight)

    def expert_weight_grad_(
        self,
        grad: Tensor,
        dy: Tensor,
        x: Tensor,
        expert: Tensor,
        experts: int,
        axes: tuple[str, ...],
    ) -> Tensor:
        """Add the gradient of `expert_linear` for its weight into grad [my experts, n,
        k]: dy [rows, n], x [rows, k]."""
        begin = self.start(experts, axes)
        return kernels.expert_weight_grad_(grad, dy, x, expert - begin)


def _local(index: Tensor, begin: int, length: int) -> tuple[Tensor, Tensor]:
    """Global index [...] -> position in my shard [...], which is 0 where it lies in
    none of it; and where that is so, bool [...]."""
    local = index - begin
    outside = (local < 0) | (local >= length)
    return local.masked_fill_(outside, 0), outside
