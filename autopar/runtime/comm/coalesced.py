"""Several tensors in one message: where each of them lies, in and out.

A rank's row is its parts of all tensors, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Consecutive ranks, each with parts of these shapes."""

    ranks: int
    shapes: tuple[Shape, ...]

    @property
    def count(self) -> int:
        """Elements of a rank's row."""
        return sum(map(prod, self.shapes))

    def parts(self, rows: Tensor) -> list[Tensor]:
        """rows [ranks, count or more] -> of each tensor its parts [ranks, *shape]."""
        parts, start = [], 0
        for shape in self.shapes:
            row = rows[:, start : start + prod(shape)]
            parts.append(row.view(self.ranks, *shape))
            start += prod(shape)
        return parts


@dataclass(frozen=True)
class Layout:
    """dims: of each tensor the one along which its parts lie. runs: of ranks, in order;
    shares are as even as can be, so that there are few, however many ranks there are.
    """

    dims: tuple[int, ...]
    runs: tuple[Run, ...]

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor],
        dims: Sequence[int],
        extents: Sequence[Sequence[int]],
    ) -> Layout:
        """tensors: wholes or parts of them. extents: of each, its parts' by rank."""

        def shapes(own: Sequence[int]) -> tuple[Shape, ...]:
            return tuple(
                (*x.shape[:dim], extent, *x.shape[dim + 1 :])
                for x, dim, extent in zip(tensors, dims, own, strict=True)
            )

        alike = groupby(zip(*extents, strict=True))
        runs = (Run(sum(1 for _ in ranks), shapes(own)) for own, ranks in alike)
        return cls(tuple(dims), tuple(runs))

    @property
    def counts(self) -> list[int]:
        """Elements of each rank's row."""
        return [n for run in self.runs for n in [run.count] * run.ranks]

    def parts(self, row: Tensor, rank: int) -> list[Tensor]:
        """row [count or more] -> views of a rank's part of each tensor."""
        for run in self.runs:
            if rank < run.ranks:
                one = Run(1, run.shapes)
                return [part[0] for part in one.parts(row.unsqueeze(0))]
            rank -= run.ranks
        raise IndexError(f"there are {len(self.counts)} ranks")

    def rows_for(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        """Room for all rows, as long as the longest [ranks, count]; mine filled in."""
        rows = shards[0].new_empty(len(counts := self.counts), max(counts))
        for part, shard in zip(self.parts(rows[rank], rank), shards, strict=True):
            part.copy_(shard)
        return rows

    @property
    def joins_in_place(self) -> bool:
        """Whether the rows are the whole already: of a tensor that is alone."""
        alone = len(self.dims) == len(self.runs) == 1
        return alone and prod(self.runs[0].shapes[0][: self.dims[0]]) == 1

    def join(self, rows: Tensor) -> list[Tensor]:
        """rows [ranks, count] -> the wholes; a copy, unless it `joins_in_place`."""
        if self.joins_in_place:
            return [rows.view(self._whole(0))]
        wholes = [rows.new_empty(self._whole(i)) for i in range(len(self.dims))]
        blocks = rows.split([run.ranks for run in self.runs])
        for run, block, cuts in zip(self.runs, blocks, self._cuts(wholes), strict=True):
            for part, cut in zip(run.parts(block), cuts, strict=True):
                cut.copy_(part)
        return wholes

    def split(self, wholes: Sequence[Tensor]) -> Tensor:
        """The rows of all ranks, one after the other: [sum of counts], a copy."""
        flat = wholes[0].new_empty(sum(self.counts))
        blocks = flat.split([run.ranks * run.count for run in self.runs])
        for run, block, cuts in zip(self.runs, blocks, self._cuts(wholes), strict=True):
            parts = run.parts(block.view(run.ranks, run.count))
            for part, cut in zip(parts, cuts, strict=True):
                part.copy_(cut)
        return flat

    def _whole(self, i: int) -> Shape:
        shape = list(self.runs[0].shapes[i])
        dim = self.dims[i]
        shape[dim] = sum(run.ranks * run.shapes[i][dim] for run in self.runs)
        return tuple(shape)

    def _cuts(self, wholes: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yields each run's parts of the wholes, [ranks, *shape]: a copy for each of
        these, not for each rank."""
        begins = [0] * len(wholes)
        for run in self.runs:
            cuts = []
            for i, (x, dim) in enumerate(zip(wholes, self.dims, strict=True)):
                shape = run.shapes[i]
                own = x.narrow(dim, begins[i], run.ranks * shape[dim])
                cut = own.view(*shape[:dim], run.ranks, *shape[dim:])
                cuts.append(cut.movedim(dim, 0) if dim else cut)
                begins[i] += run.ranks * shape[dim]
            yield cuts
