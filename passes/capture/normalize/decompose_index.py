"""Look-ups of rows by number, in a spelling whose sharding rule is plain."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...graph import Node, Value
from ...rewrite import Rewriter
from ..normalize.loss import pick_rows


def index(rewriter: Rewriter, node: Node) -> Value | None:
    """`x[...]` with tensors in the brackets, where each row is looked up in its own."""
    whole = _seen_whole(rewriter, node)
    return whole if whole is not None else _each_in_its_own(rewriter, node)


def _seen_whole(rewriter: Rewriter, node: Node) -> Value | None:
    """`x[arange(b)[:, None], arange(s)]` is x itself, seen with more dims.

    Masks of Hugging Face models look up the padding mask this way.
    """
    x, indices = node.named("self indices")
    if any(i is None for i in indices) or len(indices) != len(x.shape):
        return None
    out, last = node.out, -1
    for dim, position in enumerate(indices):
        rows = rewriter.constant(position)
        if rows is None or rows.numel() != x.shape[dim]:
            return None
        if not torch.equal(rows.flatten(), torch.arange(x.shape[dim])):
            return None
        # Which dim of the result this index runs along, counted from the right.
        along = [i - rows.ndim for i, n in enumerate(rows.shape) if n != 1]
        place = along[0] + len(out.shape) if along else last
        if place < last:
            return None
        last = place
    return rewriter.reshape(x, out.shape)


def _each_in_its_own(rewriter: Rewriter, node: Node) -> Value | None:
    """`x[arange(b), i]` is a gather along the dim after those that are counted through,
    and of logits what a loss picks.

    Classifiers take the last token of each sample this way, and losses by hand the
    target of each row.
    """
    x, indices = node.named("self indices")
    places = own_places(rewriter, x, indices)
    if places is None:
        return None
    along, index = places
    lead = index.shape
    if lead == x.shape[:along] == x.shape[:-1] and x.dtype.is_floating_point:
        return pick_rows(rewriter, x, index, None)
    index = spread(rewriter, index, along, x.shape[along + 1 :])
    looked_up = rewriter.emit("aten.gather.default", x, along, index)
    return rewriter.reshape(looked_up, node.out.shape)


def own_places(
    rewriter: Rewriter, x: Value, indices: Sequence[Value | None]
) -> tuple[int, Value] | None:
    """The dim that `x[arange(b), i]` looks up in, after those that are counted through,
    and the numbers there, from 0 on, of the shape of all indices together."""
    along = len(indices) - 1
    at = [i for i in indices if i is not None]
    if along < 1 or len(at) != len(indices):
        return None
    lead = torch.broadcast_shapes(*(i.shape for i in at))
    for dim, position in enumerate(at[:-1]):
        if not _counts(rewriter, position, x.shape[dim], dim, len(lead)):
            return None
    index = at[-1]
    if index.dtype != torch.int64 or lead[:along] != x.shape[:along]:
        return None
    index = _from_the_start(rewriter, index, x.shape[along])
    return along, rewriter.expand(index, lead)


def spread(rewriter: Rewriter, x: Value, along: int, rest: Sequence[int]) -> Value:
    """[*lead] -> [*lead[:along], all others of lead, *rest], each repeated over the
    rest."""
    shape = (*x.shape[:along], math.prod(x.shape[along:]))
    x = rewriter.reshape(x, (*shape, *(1 for _ in rest)))
    return rewriter.expand(x, (*shape, *rest))


def _counts(
    rewriter: Rewriter, position: Value, extent: int, dim: int, rank: int
) -> bool:
    """Whether an index counts 0, 1, 2 ... along one dim, over the whole extent, and is
    constant along the others."""
    if (copies := rewriter.producer(position, "aten.expand")) is not None:
        position = copies.operands[0]
    shape = (1,) * (rank - len(position.shape)) + position.shape
    rows = rewriter.constant(position) if shape[dim] == extent else None
    if rows is None:
        return False
    numbers = torch.arange(extent).view([-1 if i == dim else 1 for i in range(rank)])
    return torch.equal(rows.reshape(shape), numbers.expand(shape))


def _from_the_start(rewriter: Rewriter, index: Value, size: int) -> Value:
    """Numbers that count from the end, -1 the last, counted from the start."""
    back = rewriter.emit("aten.lt.Scalar", index, 0)
    moved = rewriter.emit("aten.add.Tensor", index, size)
    return rewriter.emit("aten.where.self", back, moved, index)
