"""A rank's position on the mesh, and its share of a dim.

A dim is split over axes by `passes.shard.layout`, outermost axis first. "My share" is
the part that belongs to this rank's coordinate.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from autopar.passes.mesh import TIME, Axes, Mesh, as_axes, nested
from autopar.passes.shard.layout import Pieces, extent, layout, within
from autopar.runtime.comm.own_rows import Field, OwnRows
from autopar.runtime.comm.step_state import StepState


class Placement:
    """One rank's place on the mesh, and in time by the `state` of its step."""

    def __init__(
        self, mesh: Mesh, rank: int, microbatches: int, device: torch.device
    ) -> None:
        self.mesh, self.rank, self.device = mesh, rank, device
        self.coords = mesh.coords(rank)
        self.everyone = tuple(range(mesh.size))
        self.state = StepState(microbatches)
        self._ranks: dict[tuple[str, ...], tuple[int, ...]] = {}

    def ranks(self, axes: Axes) -> tuple[int, ...]:
        """The ranks that differ from this one on these axes only, ascending."""
        axes = as_axes(axes)
        if axes not in self._ranks:
            self._ranks[axes] = self.mesh.group(self.rank, axes)
        return self._ranks[axes]

    def place(self, axes: Axes) -> int:
        """The index of this rank among those along these axes."""
        return self.ranks(axes).index(self.rank)

    def layout(self, n: int, axis: Axes) -> tuple[Pieces, ...]:
        """The pieces of n rows on each rank of an axis; of each microbatch, on "time".
        Several axes, outermost first: on each of their ranks."""
        if not isinstance(axis, str):
            coords = (self.mesh.coords(rank) for rank in self.ranks(axis))
            return tuple(self.pieces(n, axis, one) for one in coords)
        if axis == TIME:
            return layout(n, self.state.microbatches)
        return layout(n, len(self.ranks((axis,))), axis in self.state.zigzag)

    def extents(self, n: int, axes: Axes) -> tuple[int, ...]:
        """How much of a parameter's dim of n each rank on these axes holds at rest: one
        piece, after that of the rank before it."""
        return nested(n, tuple(map(self.mesh.axis_size, as_axes(axes))))

    def pieces(
        self,
        n: int,
        axes: tuple[str, ...],
        coords: Mapping[str, int] = MappingProxyType({}),
    ) -> Pieces:
        """The pieces of a dim of n rows that this rank holds if `axes` split it,
        outermost first; "time" may be one. coords: those of another rank, where they
        differ."""
        pieces: Pieces = ((0, n),)
        here = {TIME: self.state.microbatch, **self.coords, **coords}
        for axis in axes:
            share = self.layout(extent(pieces), axis)[here.get(axis, 0)]
            pieces = within(pieces, share)
        return pieces

    def shard(self, x: Field, axis: str, dim: int) -> Field:
        """My share of x along dim, a view if it is one piece; nothing is sent. `axis`
        may be "time"."""
        if isinstance(x, OwnRows):
            return x.shard(axis, self.state.microbatch)
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
