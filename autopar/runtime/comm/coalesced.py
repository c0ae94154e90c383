"""Several tensors in one message: where each of them lies, in and out.

A rank's row is its parts of all tensors, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """dims: of each tensor the one along which its parts lie. shapes: of each rank's
    parts, by rank and tensor."""

    dims: tuple[int, ...]
    shapes: tuple[tuple[Shape, ...], ...]

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor],
        dims: Sequence[int],
        extents: Sequence[Sequence[int]],
    ) -> Layout:
        """tensors: wholes or parts of them. extents: of each, its parts' by rank."""
        columns = [
            [(*x.shape[:dim], extent, *x.shape[dim + 1 :]) for extent in along]
            for x, dim, along in zip(tensors, dims, extents, strict=True)
        ]
        return cls(tuple(dims), tuple(zip(*columns, strict=True)))

    @property
    def counts(self) -> list[int]:
        """Elements of each rank's row."""
        return [sum(map(prod, own)) for own in self.shapes]

    def parts(self, row: Tensor, rank: int) -> list[Tensor]:
        """row [count or more] -> views of a rank's part of each tensor."""
        shapes = self.shapes[rank]
        starts = accumulate(map(prod, shapes), initial=0)
        return [
            row[start : start + prod(shape)].view(shape)
            for shape, start in zip(shapes, starts, strict=False)
        ]

    def rows_for(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        """Room for all rows, as long as the longest [ranks, count]; mine filled in."""
        rows = shards[0].new_empty(len(self.shapes), max(self.counts))
        for part, shard in zip(self.parts(rows[rank], rank), shards, strict=True):
            part.copy_(shard)
        return rows

    @property
    def joins_in_place(self) -> bool:
        """Whether the rows are the whole already: of a tensor that is alone."""
        alone = len(self.dims) == 1 and len(set(self.shapes)) == 1
        return alone and prod(self.shapes[0][0][: self.dims[0]]) == 1

    def join(self, rows: Tensor) -> list[Tensor]:
        """rows [ranks, count] -> the wholes; a copy, unless it `joins_in_place`."""
        ranks = range(len(self.shapes))
        if self.joins_in_place:
            (dim,), (shape,) = self.dims, self.shapes[0]
            extent = shape[dim] * len(ranks)
            return [rows.view(*shape[:dim], extent, *shape[dim + 1 :])]
        by_rank = [self.parts(rows[r], r) for r in ranks]
        return [
            torch.cat(parts, dim)
            for parts, dim in zip(zip(*by_rank, strict=True), self.dims, strict=True)
        ]

    def split(self, wholes: Sequence[Tensor]) -> Tensor:
        """The rows of all ranks, one after the other: [sum of counts], a copy."""
        flat = wholes[0].new_empty(sum(self.counts))
        if len(set(self.shapes)) == 1:  # a copy for each tensor, not for each part
            n = len(self.shapes)
            rows = flat.view(n, -1).split([prod(s) for s in self.shapes[0]], 1)
            for x, dim, part in zip(wholes, self.dims, rows, strict=True):
                cut = x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)
                part.view(cut.shape).copy_(cut)
            return flat
        begins = [0] * len(wholes)
        for rank, row in enumerate(flat.split(self.counts)):
            for i, part in enumerate(self.parts(row, rank)):
                extent = part.shape[self.dims[i]]
                part.copy_(wholes[i].narrow(self.dims[i], begins[i], extent))
                begins[i] += extent
        return flat
