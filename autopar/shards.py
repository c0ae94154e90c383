"""A parameter's shards: cut from the whole, and put together again.

A tensor dim is a product of named dims, each of which axes may split; a shard is that
part of each named dim which belongs to a rank's coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from passes.mesh import Mesh, balanced, start
from passes.program import ParameterSpec


def spans(
    spec: ParameterSpec, mesh: Mesh, coords: Mapping[str, int]
) -> list[tuple[int, int]]:
    """(start, length) of each factor of each dim on the rank at `coords`."""
    found = []
    for factors, slots in zip(spec.factors, spec.slots, strict=True):
        for extent, axes in zip(factors, slots, strict=True):
            begin, length = 0, extent
            for axis in axes:
                parts, here = mesh.axis_size(axis), coords[axis]
                begin += start(length, parts, here)
                length = balanced(length, parts)[here]
            found.append((begin, length))
    return found


def shard_view(
    whole: Tensor, spec: ParameterSpec, mesh: Mesh, coords: Mapping[str, int]
) -> Tensor:
    """A view of the rank's part of `whole`, with each factor as a dim of its own."""
    view = whole.reshape([n for factors in spec.factors for n in factors])
    for dim, (begin, length) in enumerate(spans(spec, mesh, coords)):
        view = view.narrow(dim, begin, length)
    return view


def local_shape(
    spec: ParameterSpec, mesh: Mesh, coords: Mapping[str, int]
) -> tuple[int, ...]:
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
    """The rank's own copy of its part of `whole`."""
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


def owns(
    spec: ParameterSpec, mesh: Mesh, coords: Mapping[str, int], ranks: tuple[int, ...]
) -> bool:
    """Whether this rank is the first of those that hold the same part.

    ranks: the pipeline ranks of the stages that hold the parameter.
    """
    if coords.get("pp", 0) != ranks[0]:
        return False
    return all(
        i == 0
        for axis, i in coords.items()
        if axis != "pp" and axis not in spec.split_axes
    )
