"""Shares of a tensor as the flat buffers that are sent, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from autopar.passes.shard.layout import Pieces, extent


def packed(x: Tensor, dim: int, layout: Sequence[Pieces]) -> tuple[Tensor, list[int]]:
    """x cut along dim into shares, one after the other in a flat buffer (which may be
    x itself), and the number of elements of each. Even shares take one copy, if any."""
    unit = prod(x.shape[:dim]) * prod(x.shape[dim + 1 :])
    counts = [unit * extent(share) for share in layout]
    if in_order(layout):
        if len(set(map(extent, layout))) == 1:
            rows = x.unflatten(dim, (len(layout), x.shape[dim] // len(layout)))
            return rows.movedim(dim, 0).reshape(-1).contiguous(), counts
        if prod(x.shape[:dim]) == 1:
            return x.contiguous().view(-1), counts
    flat = x.new_empty(x.numel())
    for share, room in zip(layout, flat.split(counts), strict=True):
        lengths = [length for _, length in share]
        shape = (*x.shape[:dim], sum(lengths), *x.shape[dim + 1 :])
        parts = room.view(shape).split(lengths, dim) if lengths else ()
        for piece, part in zip(share, parts, strict=True):
            part.copy_(x.narrow(dim, *piece))
    return flat, counts


def by_row(x: Tensor, dim: int, layout: Sequence[Pieces]) -> Tensor:
    """x, one share after the other, with its rows in their order in the dim."""
    if in_order(layout):
        return x
    return joined(x.split([extent(share) for share in layout], dim), dim, layout)


def joined(shards: Sequence[Tensor], dim: int, layout: Sequence[Pieces]) -> Tensor:
    """The transpose of `packed`: the rows of all shares, in their order in the dim."""
    placed = []
    for share, shard in zip(layout, shards, strict=True):
        lengths = [length for _, length in share]
        parts = shard.split(lengths, dim) if lengths else ()
        placed += [(begin, part) for (begin, _), part in zip(share, parts, strict=True)]
    return torch.cat([part for _, part in sorted(placed, key=lambda p: p[0])], dim)


def in_order(layout: Sequence[Pieces]) -> bool:
    """Whether the shares, one after another, are the whole dim in order."""
    begins = [begin for share in layout for begin, _ in share]
    return all(len(share) < 2 for share in layout) and begins == sorted(begins)


def from_front(x: Tensor, dim: int) -> int:
    """dim, counted from the front."""
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"x has {x.dim()} dims, and no dim {dim}")
    return dim % x.dim()
