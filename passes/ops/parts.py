"""Ops that take or write a part of one dim."""

from __future__ import annotations

from typing import Any

from ..graph import Node, Value
from ..ops.op import op_of


def part_of(node: Node) -> tuple[Value, int, int, int] | None:
    """(value, dim, start, end) of an op that takes or writes a part of one dim."""
    bounds = op_of(node).part
    return bounds and (node.operands[0], dim_of(node), *bounds(node))


def sliced(node: Node) -> tuple[int, int]:
    """`start:end`."""
    extent = _extent(node)
    low = _position(node.arg("start"), 0, extent)
    return low, max(low, _position(node.arg("end"), extent, extent))


def narrowed(node: Node) -> tuple[int, int]:
    """The part [begin, end) that `narrow` takes."""
    low = _position(node.arg("start"), 0, _extent(node))
    return low, low + node.out.shape[dim_of(node)]


def picked(node: Node) -> tuple[int, int]:
    """One index."""
    low = _position(node.arg("index"), 0, _extent(node))
    return low, low + 1


def comb_of(node: Node) -> int:
    """n > 1 of what takes or writes each n-th of a whole dim, see `is_comb`; else 1."""
    part, step = part_of(node), int(node.arg("step") or 1)
    if part is None:
        return 1
    x, dim, start, end = part
    return step if is_comb(x.shape[dim], start, end, step) else 1


def steps_in(node: Node) -> bool:
    """Whether some of the elements between start and end are left out, each n-th of a
    part or with a rest: not those of `comb_of`."""
    return int(node.arg("step") or 1) > 1 and comb_of(node) == 1


def is_comb(extent: int, start: int, end: int, step: int) -> bool:
    """Whether a slice takes one of each `step` elements, to the end."""
    last = start + (extent // step - 1) * step
    return start < step and step > 1 and extent % step == 0 and last < end


def _extent(node: Node) -> int:
    return node.operands[0].shape[dim_of(node)]


def _position(at: Any, default: int, extent: int) -> int:
    if at is None:
        return default
    return min(max(at + extent if at < 0 else at, 0), extent)


def dim_of(node: Node, rank: int | None = None) -> int:
    """Returns the op's dim, counted from 0. rank: of the tensor it counts in, by
    default the first operand."""
    rank = len(node.operands[0].shape) if rank is None else rank
    return int(node.arg("dim")) % rank


# --- What a write to a part makes of the whole --------------------------------------

Written = tuple[str, tuple[Any, ...]]


def into_slice(view: Node, base: Value, part: Value) -> Written:
    """Writes a part into the slice that the view read."""
    return "aten.slice_scatter.default", (base, part, *view.named("dim start end step"))


def into_narrow(view: Node, base: Value, part: Value) -> Written:
    """Writes a part into the range that the view read."""
    args = (base, part, dim_of(view), *narrowed(view))
    return "aten.slice_scatter.default", args


def into_row(view: Node, base: Value, part: Value) -> Written:
    """Writes a part into the row that the view read."""
    return "aten.select_scatter.default", (base, part, *view.named("dim index"))


def turned_again(view: Node, base: Value, part: Value) -> Written:
    """Two dims that change places do so again."""
    return view.op, view.with_args(self=part).args


def turned_back(view: Node, base: Value, part: Value) -> Written:
    """Permutes a part back."""
    order = [d % len(base.shape) for d in view.arg("dims")]
    back = tuple(order.index(d) for d in range(len(order)))
    return "aten.permute.default", (part, back)


def reshaped(view: Node, base: Value, part: Value) -> Written:
    """Reshapes a part to the base's shape."""
    return "aten.reshape.default", (part, base.shape)
