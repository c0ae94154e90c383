"""Where a rank lies on the mesh, and what follows from that without a message.

A dim is split over axes by `passes.shard.shares`, outermost axis first. "My share" is
the part that belongs to this rank's coordinate. `...` in a shape is any number of dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime import kernels
from autopar.runtime.comm.routing_replay import RoutingReplay
from autopar.runtime.kernels import experts as products
from autopar.runtime.kernels.sdpa import in_window
from passes.mesh import TIME, Axes, Mesh, as_axes
from passes.shard.shares import Pieces, extent, shares, within


class Placement:
    """One rank's place on the mesh and in time, and its share of tensors.

    `replay`: what routers are told to choose, if anything, see
    `autopar.runtime.comm.routing_replay`. The executor sets `zigzag`, the axes whose
    shares lie so, when it starts; and `microbatch`, the coordinate on the axis "time",
    before a forward or a backward.
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
        self.zigzag: frozenset[str] = frozenset()
        self.key = 0  # of all dropout masks of this step
        self.scale = 1.0  # of the loss, in this step
        self.evaluating = False
        self.replay: RoutingReplay | None = None
        self._ranks: dict[tuple[str, ...], tuple[int, ...]] = {}

    def ranks(self, axes: Axes) -> tuple[int, ...]:
        """The ranks that differ from this one on these axes only, ascending."""
        axes = as_axes(axes)
        if axes not in self._ranks:
            self._ranks[axes] = self.mesh.group(self.rank, axes)
        return self._ranks[axes]

    def place(self, axes: Axes) -> int:
        """Which of the ranks on these axes this one is."""
        return self.ranks(axes).index(self.rank)

    def shares(self, n: int, axis: Axes) -> tuple[Pieces, ...]:
        """What of n rows each rank of the axis holds; each microbatch, on "time". Of
        several axes, outermost first: each of their ranks."""
        if not isinstance(axis, str):
            coords = (self.mesh.coords(rank) for rank in self.ranks(axis))
            return tuple(self.pieces(n, axis, one) for one in coords)
        if axis == TIME:
            return shares(n, self.microbatches)
        return shares(n, len(self.ranks((axis,))), axis in self.zigzag)

    def pieces(
        self,
        n: int,
        axes: tuple[str, ...],
        coords: Mapping[str, int] = MappingProxyType({}),
    ) -> Pieces:
        """What I hold of a dim of n rows that is split by `axes`, outermost first;
        "time" may be one of them. coords: those of another rank, where they differ."""
        found: Pieces = ((0, n),)
        here = {TIME: self.microbatch, **self.coords, **coords}
        for axis in axes:
            share = self.shares(extent(found), axis)[here.get(axis, 0)]
            found = within(found, share)
        return found

    def shard(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """My share of x along dim, a view if it is one piece; nothing is sent. `axis`
        may be "time"."""
        pieces = self.pieces(x.shape[dim], (axis,))
        if len(pieces) == 1:
            return x.narrow(dim, *pieces[0])
        parts = [x.narrow(dim, *piece) for piece in pieces]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def pad(self, x: Tensor, axis: str, dim: int, n: int) -> Tensor:
        """The transpose of `shard`: x in its place along dim of n rows, else zeros."""
        shape = list(x.shape)
        shape[dim] = n
        whole = x.new_zeros(shape)
        pieces = self.pieces(n, (axis,))
        parts = x.split([length for _, length in pieces], dim) if pieces else ()
        for piece, part in zip(pieces, parts, strict=True):
            whole.narrow(dim, *piece).copy_(part)
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
            [(n, self.pieces(n, axes)) for n, axes in factors] for factors in position
        ]
        return kernels.dropout_mask(p, self.key, number, dims, self.device)

    def choose(
        self,
        x: Tensor,
        k: int,
        number: int,
        position: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...],
    ) -> Tensor:
        """The places of the k largest scores of my rows: x [..., n] -> int64 [..., k];
        or what `replay` tell them. number, position: as of dropout, but of rows."""
        own = x.topk(k).indices
        if self.replay is None:
            return own
        rows = self.replay.told[number].to(x.device)
        for dim, factors in enumerate(position):
            rows = rows.index_select(dim, self._positions(factors))
        return self.replay.take(x, own, rows, (number, self.rank, self.microbatch))

    def _positions(self, factors: tuple[tuple[int, tuple[str, ...]], ...]) -> Tensor:
        """Which rows of a dim are mine: int64. factors: (global extent, axes)."""
        rows = torch.zeros(1, dtype=torch.int64, device=self.device)
        for n, axes in factors:
            mine = kernels.positions(self.pieces(n, axes), self.device)
            rows = (rows[:, None] * n + mine).flatten()
        return rows

    def causal_mask(
        self,
        position: tuple[tuple[int, tuple[str, ...]], ...],
        columns: int,
        window: int | None = None,
    ) -> Tensor:
        """Which keys my rows of a sequence may see: bool [my rows, columns].

        position: the factors of the dim of rows: (global extent, axes that split it).
        window: keys up to its own that a row sees at most.
        """
        rows, keys = self._positions(position), torch.arange(columns)
        return in_window(rows, keys.to(self.device), window or columns)

    # Rows and entries of a sharded dim. Indices are global and int64; sizes are those
    # of the dim before it was split. What another rank holds counts as zero here.

    def lookup(
        self, weight: Tensor, ids: Tensor, n: int, axes: tuple[str, ...]
    ) -> Tensor:
        """weight [my rows, width], ids [...] -> [..., width], a pending sum over axes:
        rows that are not in my shard are zeros."""
        pieces = self.pieces(n, axes)
        if extent(pieces) == n:
            return F.embedding(ids, weight)
        kernels.check_indices(ids, n)
        if not pieces:
            return weight.new_zeros(*ids.shape, weight.shape[1])
        local, outside = _local(ids, pieces)
        return F.embedding(local, weight).masked_fill_(outside.unsqueeze(-1), 0)

    def lookup_grad_(
        self,
        grad: Tensor,
        dy: Tensor,
        ids: Tensor,
        n: int,
        axes: tuple[str, ...],
        padding: int | None = None,
    ) -> Tensor:
        """Add the gradient of `lookup` into grad [my rows, width]: dy [..., width].

        Row `padding` of the whole table, where given, gets nothing.
        """
        pieces = self.pieces(n, axes)
        if not pieces:
            return grad
        if padding is not None:
            ids = ids.masked_fill(ids == padding, -1)
        if extent(pieces) != n or padding is not None:
            ids, outside = _local(ids, pieces)
            dy = dy.masked_fill(outside.unsqueeze(-1), 0)
        return kernels.embedding_grad_(grad, dy, ids)

    def pick(
        self,
        x: Tensor,
        index: Tensor,
        ignored: int | None,
        n: int,
        axes: tuple[str, ...],
    ) -> Tensor:
        """x [..., my extent], index [...] -> x[..., index] [...], a pending sum over
        axes. An index that is to be ignored, such as -100, picks zero on every rank."""
        kernels.check_indices(index, n, ignored)
        pieces = self.pieces(n, axes)
        if not pieces:
            return x.new_zeros(index.shape)
        local, outside = _local(index, pieces)
        picked = x.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        return picked.masked_fill_(outside, 0)

    def pick_backward(
        self, dy: Tensor, index: Tensor, n: int, axes: tuple[str, ...]
    ) -> Tensor:
        """dy [...], index [...] -> dx [..., my extent]."""
        dx = dy.new_zeros(*index.shape, extent(self.pieces(n, axes)))
        return self.pick_backward_add_(dx, dy, index, n, axes)

    def pick_backward_add_(
        self,
        buffer: Tensor,
        dy: Tensor,
        index: Tensor,
        n: int,
        axes: tuple[str, ...],
    ) -> Tensor:
        """Add `pick_backward` into buffer [..., my extent], of dy's dtype."""
        pieces = self.pieces(n, axes)
        if not pieces:
            return buffer
        local, outside = _local(index, pieces)
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
        kernels.check_indices(expert, experts)
        mine = self._expert(expert, experts, axes)
        return products.expert_linear(x, mine, weight.mT)

    def expert_linear_transposed(
        self,
        dy: Tensor,
        expert: Tensor,
        weight: Tensor,
        experts: int,
        axes: tuple[str, ...],
    ) -> Tensor:
        """The gradient of `expert_linear` for x: dy [rows, n] -> [rows, k]."""
        mine = self._expert(expert, experts, axes)
        return products.expert_linear(dy, mine, weight)

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
        mine = self._expert(expert, experts, axes)
        return products.expert_weight_grad_(grad, dy, x, mine)

    def _expert(self, expert: Tensor, experts: int, axes: tuple[str, ...]) -> Tensor:
        """expert [rows] -> which of my own it is, -1 for another rank's."""
        pieces = self.pieces(experts, axes)
        if not pieces:
            return torch.full_like(expert, -1)
        local, outside = _local(expert, pieces)
        return local.masked_fill_(outside, -1)


def _local(index: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """Global index [...] -> position in my share [...], which is 0 where it lies in
    none of it; and where that is so, bool [...]."""
    (begin, passed), *others = pieces
    local = index - begin
    outside = (local < 0) | (local >= passed)
    for begin, length in others:
        here = (index >= begin) & (index < begin + length)
        local = torch.where(here, index - begin + passed, local)
        outside, passed = outside & ~here, passed + length
    return local.masked_fill_(outside, 0), outside
