"""Ops that a rank computes by its place on the mesh, without a message.

Masks of dropout, choices of routers, and rows and entries of a sharded dim, whose
indices are global. `...` in a shape is any number of dims.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.passes.mesh import Split
from autopar.passes.ops.random import Kind
from autopar.passes.shard.layout import Pieces, extent
from autopar.runtime import kernels
from autopar.runtime.comm.placement import Placement
from autopar.runtime.kernels import experts as products
from autopar.runtime.kernels.sdpa import in_window


class LocalOps(Placement):
    """The calls of emitted code that a rank answers by itself."""

    def dropout_counters(
        self, number: int, position: tuple[tuple[Split, ...], ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the random bits of dropout `number` of the model are mixed from in my
        part of a tensor: int64 [all but the last extent, 1] and [last], to be added up.

        position: for each dim, its named dims.
        None where there is no dropout, as while evaluating.
        """
        if self.state.evaluating or not self.state.masks:
            return None, None
        dims = [[(n, self.pieces(n, axes)) for n, axes in dim] for dim in position]
        return kernels.counters(self.state.key, number, dims, self.device)

    def draw(
        self,
        kind: Kind,
        number: int,
        position: tuple[tuple[Split, ...], ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """Random numbers of a kind, of my part of a tensor: as of dropout."""
        dims = [[(n, self.pieces(n, axes)) for n, axes in dim] for dim in position]
        return kernels.draw(kind, self.state.key, number, dims, self.device, dtype)

    def choose(
        self, x: Tensor, k: int, number: int, position: tuple[tuple[Split, ...], ...]
    ) -> Tensor:
        """The places of the k largest scores of my rows: x [..., n] -> int64 [..., k];
        or what a replay tells them. number, position: as of dropout, but of rows."""
        own = x.topk(k).indices
        replay = self.state.replay
        if replay is None:
            return own
        rows = replay.told[number].to(x.device)
        for dim, factors in enumerate(position):
            rows = rows.index_select(dim, self.positions(factors))
        return replay.take(x, own, rows, (number, self.rank, self.state.microbatch))

    def positions(self, factors: tuple[Split, ...]) -> Tensor:
        """The rows of a dim that are mine: int64. factors: the dim's."""
        rows = torch.zeros(1, dtype=torch.int64, device=self.device)
        for n, axes in factors:
            mine = kernels.positions(self.pieces(n, axes), self.device)
            rows = (rows[:, None] * n + mine).flatten()
        return rows

    def causal_mask(
        self,
        position: tuple[Split, ...],
        columns: int,
        window: int | None = None,
        documents: Tensor | None = None,
        shown: Tensor | None = None,
    ) -> Tensor:
        """Which keys my rows of a sequence may see: bool [my rows, columns]; with
        documents [B,columns], those of the row's own, [B,1,my rows,columns]; shown,
        bool [B,columns]: keys that any row may see.

        position: the named dims of the dim of rows.
        window: keys up to its own that a row sees at most.
        """
        rows, keys = self.positions(position), torch.arange(columns)
        seen = in_window(rows, keys.to(self.device), window or columns)
        if documents is not None:
            same = documents[:, rows, None] == documents[:, None]
            seen = (same & seen).unsqueeze(1)
        return seen if shown is None else shown[:, None, None] & seen

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

    def pick_backward_add_(
        self, buffer: Tensor, dy: Tensor, index: Tensor, n: int, axes: tuple[str, ...]
    ) -> Tensor:
        """Add dy [...] to where index [...] picked, in buffer [..., my extent]."""
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

    def group_rows(
        self, expert: Tensor, experts: int, axes: tuple[str, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """expert [rows] -> the same in the order of my experts, those of others at the
        end; where each was [rows]; where my experts' rows end, int32 [my experts]."""
        kernels.check_indices(expert, experts)
        mine = self._expert(expert, experts, axes)
        count = extent(self.pieces(experts, axes))
        places, ends = products.by_expert(mine, count)
        return expert.index_select(0, places), places, ends

    def grouped_linear(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """x [rows, k] in the order of experts, weight [my experts, n, k], ends of their
        rows [my experts] -> [rows, n], zeros in rows of others' experts."""
        return products.grouped_linear(x, weight.mT, ends)

    def grouped_linear_transposed(
        self, dy: Tensor, weight: Tensor, ends: Tensor
    ) -> Tensor:
        """The gradient of `grouped_linear` for x: dy [rows, n] -> [rows, k]."""
        return products.grouped_linear(dy, weight, ends)

    def grouped_weight_grad_(
        self, grad: Tensor, dy: Tensor, x: Tensor, ends: Tensor
    ) -> Tensor:
        """Add the gradient of `grouped_linear` for its weight into grad [my experts, n,
        k]: dy [rows, n], x [rows, k]."""
        return products.grouped_weight_grad_(grad, dy, x, ends)

    def _expert(self, expert: Tensor, experts: int, axes: tuple[str, ...]) -> Tensor:
        """expert [rows] -> its index among my own, -1 for another rank's."""
        pieces = self.pieces(experts, axes)
        if not pieces:
            return torch.full_like(expert, -1)
        local, outside = _local(expert, pieces)
        return local.masked_fill_(outside, -1)


def _local(index: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """Global index [...] -> position in my share [...], 0 where it is outside; and
    whether it is inside, bool [...]."""
    (begin, passed), *others = pieces
    local = index - begin
    outside = (local < 0) | (local >= passed)
    for begin, length in others:
        here = (index >= begin) & (index < begin + length)
        local = torch.where(here, index - begin + passed, local)
        outside, passed = outside & ~here, passed + length
    return local.masked_fill_(outside, 0), outside
