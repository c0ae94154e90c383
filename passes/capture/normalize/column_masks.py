"""Masks that keep packed documents apart, or padding out: what attention needs to know
of each column, instead of a mask of all rows and columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import torch

from ...graph import Node, Value
from ...ops.arguments import arguments
from ...rewrite import Rewriter
from ..normalize.causal_masks import (
    SMALL,
    VIEWS,
    causal_window,
    is_of_positions,
)

ANDS = frozenset(f"aten.{n}" for n in ("__and__", "bitwise_and", "logical_and"))
# Comparisons of what rows have with what columns have, and with sides changed.
ORDERS = {"aten.le": False, "aten.ge": True}


@dataclass(frozen=True)
class Columns:
    """What a row sees: columns of its own id, of the last `window` up to its own, that
    are shown to any row. ids: [batch or 1, seq] integers, or None if these are all the
    same. shown: bool [..., 1, columns], or None for all. window: 0, if it sees columns
    after its own too."""

    ids: Value | None
    window: int
    shown: Value | None


def columns_of(rewriter: Rewriter, mask: Value) -> Columns | None:
    """What a bool mask [rows, columns] or [batch, 1, rows, columns] shows, where this
    can be said column by column. None for another mask.

    Two ways to say "up to": by places (`causal_window`), and by positions that start
    anew with each document, where the ids are counts of these starts, as transformers'
    `find_packed_sequence_indices` has it.
    """
    rows, columns = mask.shape[-2:] if len(mask.shape) > 1 else (0, 1)
    apart = len(mask.shape) == 2 or (len(mask.shape) == 4 and mask.shape[1] == 1)
    if not apart:
        return None
    ids: Value | None = None
    ordered: Value | None = None
    causal, nearest = False, rows  # by these positions
    places: list[Value] = []
    shown: list[Value] = []
    for part in _conjuncts(rewriter, mask):
        known = rewriter.constant(part) if part.numel <= SMALL else None
        if known is not None and bool(known.all()):
            continue
        if is_of_positions(rewriter, part):
            places.append(part)
            continue
        if part.dtype == torch.bool and (1, *part.shape)[-2:] == (1, columns):
            shown.append(part)
            continue
        node = rewriter.made.get(part.name)
        if node is None or len(node.operands) != 2:
            return None
        if node.name == "aten.eq":
            own, other = node.operands
            same = _compared(rewriter, own, other, rows)
            same = same or _compared(rewriter, other, own, rows)
            if same is None or ids not in (None, same):
                return None
            ids = same
            continue
        order = _order(rewriter, node, rows)
        if order is None or ordered not in (None, order[0]):
            return None
        ordered, nearest = order[0], min(nearest, order[1] or rows)
        causal = causal or not order[1]
    if ordered and (ids is None or not _counts_starts(rewriter, ids, ordered)):
        return None
    window = rows if causal and not places else _window(rewriter, places)
    window = window and min(window, nearest)
    alone = ids is None and not places and len(shown) > 0
    if not alone and (window is None or rows != columns):
        return None
    return Columns(ids, window or 0, _both(rewriter, shown))


def _order(rewriter: Rewriter, node: Node, rows: int) -> tuple[Value, int] | None:
    """The positions that rows and columns are compared by, and 0, where columns are up
    to the row's own; or how many of them, where they are after the row's less that."""
    if node.name == "aten.gt":
        column, row = node.operands
        less = rewriter.producer(row, "aten.sub")
        if less is None or less.arg("alpha") != 1:
            return None
        count = less.arg("other")
        if type(count) is not int or count < 1:
            return None
        compared = _compared(rewriter, less.operands[0], column, rows)
        return None if compared is None else (compared, count)
    if node.name not in ORDERS:
        return None
    row, column = node.operands if ORDERS[node.name] else reversed(node.operands)
    compared = _compared(rewriter, row, column, rows)
    return None if compared is None else (compared, 0)


def _window(rewriter: Rewriter, places: list[Value]) -> int | None:
    """The causal window that masks of places show together, see `causal_window`."""
    mask = _both(rewriter, places)
    return None if mask is None else causal_window(rewriter, mask)


def _both(rewriter: Rewriter, masks: list[Value]) -> Value | None:
    """The conjunction of masks; None if there are none."""

    def both(one: Value, other: Value) -> Value:
        return rewriter.emit("aten.__and__.Tensor", one, other)

    return reduce(both, masks) if masks else None


def _conjuncts(rewriter: Rewriter, mask: Value) -> Iterator[Value]:
    """The masks that are put together by "and", whatever dims of 1 are added."""
    node = rewriter.made.get(mask.name)
    of_columns = len(mask.shape) > 1 and mask.shape[-2] == 1
    if node is not None and node.name in VIEWS and not of_columns:
        inner = node.operands[0]
        if _sizes(inner) == _sizes(mask) or node.name == "aten.expand":
            yield from _conjuncts(rewriter, inner)
            return
    if node is not None and node.name in ANDS and len(node.operands) == 2:
        for part in node.operands:
            yield from _conjuncts(rewriter, part)
        return
    yield mask


def _compared(rewriter: Rewriter, row: Value, column: Value, rows: int) -> Value | None:
    """The integers [batch or 1, rows] (or [rows]) that rows and columns both have."""
    if row.shape[-2:] != (rows, 1) or (1, *column.shape)[-2:] != (1, rows):
        return None
    if row.dtype.is_floating_point or row.dtype.is_complex:
        return None
    one, other = (_line(rewriter, x, rows) for x in (row, column))
    if one is None or other is None or one == other:
        return one and other
    makers = [rewriter.made.get(x.name) for x in (one, other)]
    calls = [m and (m.op, m.args, m.kwargs) for m in makers]
    return one if calls[0] is not None and calls[0] == calls[1] else None


def _line(rewriter: Rewriter, x: Value, rows: int) -> Value | None:
    """The [batch or 1, rows] that x [..., rows, 1] or [..., 1, rows] is a view of."""
    while len(x.shape) > 2 or x.shape[-1] != rows:
        node = rewriter.made.get(x.name)
        if node is None or node.name not in VIEWS:
            return None
        inner = node.operands[0]
        if node.name != "aten.expand" and _sizes(inner) != _sizes(x):
            return None
        x = inner
    return x


def _sizes(x: Value) -> tuple[int, ...]:
    return tuple(n for n in x.shape if n > 1)


def _counts_starts(rewriter: Rewriter, ids: Value, positions: Value) -> bool:
    """Whether ids count where positions are not the one before and 1: with the same id,
    they are in the order of their places."""
    count = rewriter.producer(ids, "aten.cumsum")
    if count is None or count.arg("dim") not in (-1, len(ids.shape) - 1):
        return False
    starts = rewriter.producer(count.operands[0], "aten.ne")
    if starts is None or starts.arg("other") != 1:
        return False
    steps = rewriter.producer(starts.operands[0], "aten.diff")
    if steps is None or steps.operands[0] != positions or arguments(steps)["n"] != 1:
        return False
    return steps.arg("dim") in (-1, len(ids.shape) - 1) and ids.shape == positions.shape
