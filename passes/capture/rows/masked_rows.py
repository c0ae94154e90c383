"""Values that are written where a mask is set: the first where it first is, and so on.
How many a mask chooses is not asked for, as torch does (`nonzero`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...graph import Value
from ...rewrite import Rewriter
from ..rows.rows import Rows


def row_mask(rewriter: Rewriter, mask: Value, shape: Sequence[int]) -> Value:
    """A mask of rows, as long as may be, that choose what a mask does of a tensor with
    this shape, to which it is broadcast."""
    node = rewriter.producer(mask, "aten.expand")
    if node is not None:
        mask = node.operands[0]
    mask = rewriter.reshape(mask, (*(1 for _ in shape[len(mask.shape) :]), *mask.shape))
    lead = max((d + 1 for d, n in enumerate(mask.shape) if n > 1), default=0)
    return rewriter.expand(rewriter.reshape(mask, mask.shape[:lead]), shape[:lead])


def in_places(
    rewriter: Rewriter,
    mask: Value,
    values: Value,
    along: int = 0,
    chosen: Value | None = None,
) -> Value:
    """The values along a dim, in places of a mask, anything in others.

    chosen: bool [rows], which of the values there are; else all.
    """
    number, last = _count(rewriter, mask), values.shape[along] - 1
    if chosen is None:
        number = rewriter.emit("aten.sub.Tensor", number, 1)
    else:  # the first before which, itself included, so many are
        counts = _count(rewriter, chosen)
        number = rewriter.emit("aten.searchsorted.Tensor", counts, number)
    number = rewriter.emit("aten.clamp.default", number, 0, last)
    placed = rewriter.emit("aten.index_select.default", values, along, number)
    shape = values.shape
    return rewriter.reshape(placed, (*shape[:along], *mask.shape, *shape[along + 1 :]))


def _count(rewriter: Rewriter, mask: Value) -> Value:
    """How many of a mask are set, up to each of its elements."""
    flat = rewriter.reshape(mask, (math.prod(mask.shape),))
    return rewriter.emit("aten.cumsum.default", flat, 0)


def set_where(rewriter: Rewriter, mask: Value, values: Value, y: Value) -> Value:
    """y [*mask, ...] with values in the rows of a mask."""
    rest = y.shape[len(mask.shape) :]
    mask = rewriter.reshape(mask, (*mask.shape, *(1 for _ in rest)))
    return rewriter.emit("aten.where.self", mask, values, y)


def moved(
    rewriter: Rewriter, y: Value, mask: Value, values: Value, rows: Rows | None
) -> Value | None:
    """`y[mask] = values`, of rows that another mask chose; None of other values."""
    if rows is None or rows.dim or values.shape[1:] != y.shape[len(mask.shape) :]:
        return None
    values = in_places(rewriter, mask, values, chosen=rows.chosen)
    return set_where(rewriter, mask, values, y)
