"""Collectives: the calls of emitted code that all ranks of some axes make together.

Each is reduced to a few operations on flat buffers that an engine provides. In the
shapes below n is the number of ranks on the axis, and `passes.shard.layout` says which
rows of a dim each of them holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from autopar.passes.mesh import Axes, Mesh, Split, as_axes
from autopar.passes.shard.layout import extent
from autopar.runtime.comm import ring_attention
from autopar.runtime.comm.coalesced import Layout
from autopar.runtime.comm.flat_buffers import (
    by_row,
    from_front,
    in_order,
    joined,
    packed,
)
from autopar.runtime.comm.local_ops import LocalOps
from autopar.runtime.comm.work import (
    Arrived,
    Call,
    CoalescedWork,
    Summed,
    Traffic,
    Work,
    free_storage,
)


class Collectives(LocalOps, ABC):
    """One rank's end of collectives. `log` counts traffic by call and axes."""

    def __init__(
        self, mesh: Mesh, rank: int, microbatches: int, device: torch.device
    ) -> None:
        super().__init__(mesh, rank, microbatches, device)
        self.log: defaultdict[tuple[str, tuple[str, ...]], Traffic]
        self.log = defaultdict(Traffic)

    # Collectives. The result never shares memory with x, unless `inplace`.

    def all_reduce(
        self, x: Tensor, axes: tuple[str, ...], op: str = "sum", inplace: bool = False
    ) -> Tensor:
        """x [...] -> [...], the "sum" or "max" over all ranks on `axes`.

        `inplace` allows, and does not promise, that the result is x itself.
        """
        ranks = self._enter("all_reduce", axes, x, op=op)
        if op not in ("sum", "max"):
            raise ValueError(f"all_reduce has no op {op!r}: use 'sum' or 'max'")
        if not (inplace and x.is_contiguous()):
            x = x.clone(memory_format=torch.contiguous_format)
        if len(ranks) > 1:
            self._start_reduce_(x, ranks, op).wait()
        return x

    def all_gather(
        self, x: Tensor, axis: Axes, dim: int, whole: int | None = None
    ) -> Tensor:
        """x [..., mine, ...] -> [..., whole, ...]: the rows along dim, in order.

        whole: given where ranks' shares of it are not all the same.
        """
        joined = self.wait(self.start_gather([x], axis, [dim], [whole]))[0]
        dim = from_front(x, dim)
        return by_row(joined, dim, self.layout(joined.shape[dim], axis))

    def reduce_scatter(self, x: Tensor, axis: Axes, dim: int) -> Tensor:
        """x [..., whole, ...] -> [..., my share, ...] of the sum over the axis."""
        ranks = self._enter("reduce_scatter", as_axes(axis), x, dim=dim)
        if len(ranks) == 1:
            return x.clone()
        dim = from_front(x, dim)
        layout = self.layout(x.shape[dim], axis)
        flat, counts = packed(x, dim, layout)
        mine = extent(layout[self.place(axis)])
        total = self._start_scatter_sum(flat, counts, ranks).wait()
        return total.view(*x.shape[:dim], mine, *x.shape[dim + 1 :])

    def all_to_all(
        self,
        x: Tensor,
        axis: str,
        split_dim: int,
        concat_dim: int,
        whole: int | None = None,
    ) -> Tensor:
        """x, split on concat_dim, becomes split on split_dim.

        [..., whole (split_dim), ..., mine (concat_dim), ...] ->
        [..., my share,          ..., whole,             ...]
        whole: that of concat_dim, where ranks' shares of it are not all the same.
        """
        open_dim = None if whole is None else concat_dim
        ranks = self._enter(
            "all_to_all", (axis,), x, open_dim, split=split_dim, concat=concat_dim,
            whole=whole,
        )  # fmt: skip
        if len(ranks) == 1:
            return x.clone()
        split_dim, concat_dim = from_front(x, split_dim), from_front(x, concat_dim)
        if split_dim == concat_dim:
            raise ValueError(f"all_to_all splits and joins the same dim {split_dim}")
        sizes = self._extents(x, axis, concat_dim, whole)
        layout = self.layout(x.shape[split_dim], axis)
        flat, sent = packed(x, split_dim, layout)
        shape = list(x.shape)
        shape[split_dim] = extent(layout[self.coords[axis]])
        unit = prod(shape[:concat_dim] + shape[concat_dim + 1 :])
        counts = [unit * size for size in sizes]
        flat = self._start_exchange(flat, sent, counts, ranks).wait()
        layout = self.layout(sum(sizes), axis)
        if prod(shape[:concat_dim]) == 1 and in_order(layout):
            shape[concat_dim] = sum(sizes)
            return flat.view(shape)
        parts = []
        for part, size in zip(flat.split(counts), sizes, strict=True):
            shape[concat_dim] = size
            parts.append(part.view(shape))
        return joined(parts, concat_dim, layout)

    # Those that run while something else is computed: `wait` gives the results. All
    # ranks start and wait in the same order. They move parameters and their gradients,
    # whose shares lie in one piece.

    def start_gather(
        self,
        shards: Sequence[Tensor],
        axis: Axes,
        dims: Sequence[int],
        wholes: Sequence[int | None] | None = None,
    ) -> CoalescedWork:
        """Begin an all_gather of each, as one; they may change meanwhile. axis: of
        several the outermost first, in the order of the mesh."""
        wholes = wholes or [None] * len(shards)
        dims = [from_front(x, dim) for x, dim in zip(shards, dims, strict=True)]
        along = [
            self._extents(x, axis, dim, whole)
            for x, dim, whole in zip(shards, dims, wholes, strict=True)
        ]
        layout, me = Layout.of(shards, dims, along), self.place(axis)
        rows = layout.rows_for(shards, me)
        mine = rows[me, : layout.counts[me]]
        alike = all(whole is None for whole in wholes)
        others = [
            (*x.shape[:d], *x.shape[d + 1 :]) for x, d in zip(shards, dims, strict=True)
        ]
        ranks = self._enter(
            *("all_gather", as_axes(axis), mine, None if alike else 0),
            dims=dims, beside=others, wholes=None if alike else wholes,
        )  # fmt: skip
        alone = len(ranks) == 1
        work = Arrived(rows) if alone else self._start_gather(rows, ranks)

        def join(rows: Tensor) -> list[Tensor]:
            joined = layout.join(rows)
            if not layout.joins_in_place:
                free_storage(rows)
            return joined

        return CoalescedWork(work, join)

    def start_scatter(
        self, wholes: Sequence[Tensor], axis: Axes, dims: Sequence[int]
    ) -> CoalescedWork:
        """Begin a reduce_scatter of each, as one; they may change meanwhile."""
        me = self.place(axis)
        along = [
            self.extents(x.shape[dim], axis)
            for x, dim in zip(wholes, dims, strict=True)
        ]
        layout = Layout.of(wholes, dims, along)
        flat = layout.split(wholes)
        ranks = self._enter("reduce_scatter", as_axes(axis), flat, dims=dims)
        if len(ranks) == 1:
            return CoalescedWork(Arrived(flat), lambda row: layout.parts(row, me))

        def cut(row: Tensor) -> list[Tensor]:
            free_storage(flat)
            return layout.parts(row, me)

        return CoalescedWork(self._start_scatter_sum(flat, layout.counts, ranks), cut)

    def wait(self, transit: CoalescedWork) -> list[Tensor]:
        """The wholes of `start_gather`, or my shares of `start_scatter`."""
        return transit.unpack(transit.work.wait())

    def reduce_ranks_(self, flat: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """Sum a contiguous buffer [...] in place over ranks, ascending, me included."""
        return self.start_reduce_ranks_(flat, ranks).wait()

    def start_reduce_ranks_(self, flat: Tensor, ranks: tuple[int, ...]) -> Work:
        """Begin `reduce_ranks_`; nobody may read or write the buffer until the wait."""
        self._enter("reduce_ranks_", (), flat)
        if not flat.is_contiguous():
            raise ValueError("reduce_ranks_ works in place: give a contiguous buffer")
        alone = len(ranks) == 1
        return Arrived(flat) if alone else self._start_reduce_(flat, ranks, "sum")

    def shift(self, x: Tensor, axis: str, numel: int) -> Work:
        """Start sending x [n] to the next rank of the axis, and the last rank's to the
        first; what comes from the rank before is [numel]. x must not change meanwhile.
        """
        ranks = self._enter("shift", (axis,), x, open_dim=0)
        return self._shift(x.contiguous(), ranks, numel)

    # Attention, where rows or keys are split: see `ring_attention`.

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        rows: tuple[Split, ...],
        keys: tuple[Split, ...],
        axis: str | None = None,
        window: int | None = None,
        documents: Tensor | None = None,
        shown: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """My rows q [B,H,S,E]; k [B,G,T,E] and v [B,G,T,V], of all keys or, on a ring
        along `axis`, of my own -> out [B,H,S,V], lse [B,H,S]. window: of the keys that
        are causal for a row it sees the last so many. documents [B or 1,T]: it sees
        those with its own id, of all keys. shown, bool [B or 1,T]: keys it may see."""
        told = window, documents, shown
        scoring = ring_attention.Scoring(mask, is_causal, scale, *told)
        return ring_attention.forward(self, (q, k, v), scoring, rows, keys, axis)

    def attention_backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        rows: tuple[Split, ...],
        keys: tuple[Split, ...],
        axis: str | None = None,
        window: int | None = None,
        documents: Tensor | None = None,
        shown: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dy [B,H,S,V] -> the gradients of q, k and v; none for the mask."""
        told = window, documents, shown
        scoring = ring_attention.Scoring(mask, is_causal, scale, *told)
        outputs = (out, lse)
        return ring_attention.backward(
            self, dy, (q, k, v), outputs, scoring, rows, keys, axis
        )

    # What an engine provides. Tensors are contiguous, groups have two ranks or more.

    @abstractmethod
    def _start_reduce_(self, x: Tensor, ranks: tuple[int, ...], op: str) -> Work:
        """Begin to reduce x [...] in place over the group; the wait returns x."""

    @abstractmethod
    def _shift(self, x: Tensor, ranks: tuple[int, ...], numel: int) -> Work:
        """x [n] to the rank after me in a ring of ranks, and [numel] from that before
        me."""

    @abstractmethod
    def _start_gather(self, rows: Tensor, ranks: tuple[int, ...]) -> Work:
        """rows [n, ...], mine filled in; to be filled in when it is waited for."""

    @abstractmethod
    def _start_exchange(
        self, x: Tensor, sent: list[int], counts: list[int], ranks: tuple[int, ...]
    ) -> Work:
        """x [sum(sent)], its parts for each rank -> [sum(counts)], parts from each. x
        stays as it is until the wait."""

    def _start_scatter_sum(
        self, x: Tensor, counts: list[int], ranks: tuple[int, ...]
    ) -> Work:
        """x [sum(counts)] -> my part [counts[me]] of the sum, added in rank order. x
        stays as it is until the wait."""
        mine = [counts[ranks.index(self.rank)]] * len(ranks)
        return Summed(self._start_exchange(x, counts, mine, ranks), len(ranks))

    def _enter(
        self,
        kind: str,
        axes: tuple[str, ...],
        x: Tensor,
        open_dim: int | None = None,
        **detail: Any,
    ) -> tuple[int, ...]:
        """Count a collective and give its ranks. All of them must pass the same detail,
        and an x of the same dtype and shape but for the open dim."""
        traffic = self.log[kind, axes]
        traffic.calls += 1
        traffic.bytes += x.numel() * x.element_size()
        self._announce(Call(kind, axes, x.dtype, tuple(x.shape), open_dim, detail))
        return self.ranks(axes)

    def _announce(self, call: Call) -> None:
        """Tells what all ranks of a group are to call, where anybody listens."""

    def _extents(
        self, x: Tensor, axis: Axes, dim: int, whole: int | None
    ) -> tuple[int, ...]:
        """The extent along dim on each rank of the axis; mine must be that of x."""
        mine, place = x.shape[dim], self.place(axis)
        if whole is None:
            return (mine,) * len(self.ranks(axis))
        extents = self.extents(whole, axis)
        if mine != extents[place]:
            raise ValueError(
                f"of dim {dim}, {whole} in all, {axis}={place} holds {extents[place]}, "
                f"where x has {mine}"
            )
        return extents
