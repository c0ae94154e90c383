"""A parameter's shards: cut from the whole, and put together again.

A tensor dim is a product of named dims, each of which axes may split; a shard is that
part of each named dim which belongs to a rank's coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from autopar.passes.mesh import PIPELINE, Mesh
from autopar.passes.program import ParameterSpec, Program


def spans(
    spec: ParameterSpec, mesh: Mesh, coords: Mapping[str, int]
) -> list[tuple[int, int]]:
    """(start, length) of each factor of each dim on the rank at `coords`."""
    return [
        mesh.span(extent, axes, coords)
        for factors, slots in zip(spec.factors, spec.slots, strict=True)
        for extent, axes in zip(factors, slots, strict=True)
    ]


def shard_view(
    whole: Tensor, spec: ParameterSpec, mesh: Mesh, coords: Mapping[str, int]
) -> Tensor:
    """A view of the rank's part of `whole`, with each factor as a dim of its own.

    whole: the model's parameter, of which `spec` may be but a part.
    """
    view = whole
    for dim, begin in enumerate(spec.part.start):
        view = view.narrow(dim, begin, spec.shape[dim])
    view = view.reshape([n for factors in spec.factors for n in factors])
    for dim, (begin, length) in enumerate(spans(spec, mesh, coords)):
        view = view.narrow(dim, begin, length)
    return view


def local_shape(
    spec: ParameterSpec, mesh: Mesh, coords: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns the shape of the shard of the rank at `coords`."""
    lengths = iter([length for _, length in spans(spec, mesh, coords)])
    shape = []
    for factors in spec.factors:
        extent = 1
        for _ in factors:
            extent *= next(lengths)
        shape.append(extent)
    return tuple(shape)


def take_shard(
    whole: Tensor, spec: ParameterSpec, mesh: Mesh, coords: Mapping[str, int]
) -> Tensor:
    """Copies this rank's part of `whole`."""
    view = shard_view(whole, spec, mesh, coords)
    return view.reshape(local_shape(spec, mesh, coords)).clone(
        memory_format=torch.contiguous_format
    )


def put_shard(
    whole: Tensor,
    shard: Tensor,
    spec: ParameterSpec,
    mesh: Mesh,
    coords: Mapping[str, int],
) -> None:
    """Write a rank's part into `whole` (contiguous), in place."""
    view = shard_view(whole, spec, mesh, coords)
    view.copy_(shard.reshape(view.shape))


def is_owner(program: Program, coords: Mapping[str, int], name: str) -> bool:
    """Whether a rank is the first of those with the same part of a parameter."""
    spec = program.parameters[name]
    if coords.get(PIPELINE, 0) != program.schedule.stage_to_rank[spec.stages[0]]:
        return False
    others = {*coords} - {PIPELINE, *spec.split_axes}
    return all(coords[axis] == 0 for axis in others)


# --- boxes -------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A contiguous part of a tensor: where it begins in the whole, where it begins in
    the rank's shard, and its extents."""

    start: tuple[int, ...]
    inside: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> Box:
        """The box that is the whole tensor."""
        zeros = (0,) * len(shape)
        return cls(zeros, zeros, tuple(shape))

    def of(self, shard: Tensor) -> Tensor:
        """A view of the box in the rank's shard."""
        for dim, (begin, length) in enumerate(zip(self.inside, self.size, strict=True)):
            shard = shard.narrow(dim, begin, length)
        return shard


def boxes(
    spec: ParameterSpec, mesh: Mesh, coords: Mapping[str, int]
) -> tuple[Box, ...]:
    """The fewest boxes that a rank's shard consists of, in order; none if it is empty,
    but for a parameter that is. They begin in the model's parameter.

    A split inner factor, as in `(3 heads/tp head_dim)`, makes one for each index of the
    factors around it.
    """
    ranges = iter(spans(spec, mesh, coords))
    by_dim = [
        [
            (begin + first, inside, size)
            for first, inside, size in _runs(factors, [next(ranges) for _ in factors])
        ]
        for begin, factors in zip(spec.part.start, spec.factors, strict=True)
    ]
    every = []
    for combination in product(*by_dim):
        every.append(Box(*(tuple(run[i] for run in combination) for i in range(3))))
    of_nothing = 0 in spec.part.shape
    return tuple(box for box in every if of_nothing or 0 not in box.size)


def _runs(
    factors: Sequence[int], ranges: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """(start in the whole, start in the shard, length) of each run of indices of a dim,
    of whose factors only `ranges` (start, length) are there."""
    runs, unit = [(0, 1)], 1
    for extent, (begin, length) in zip(
        reversed(factors), reversed(ranges), strict=True
    ):
        if runs == [(0, unit)]:
            runs = [(begin * unit, length * unit)]
        else:
            rows = range(begin, begin + length)
            runs = [(row * unit + first, size) for row in rows for first, size in runs]
        unit *= extent
    pieces, inside = [], 0
    for first, size in runs:
        pieces.append((first, inside, size))
        inside += size
    return pieces
