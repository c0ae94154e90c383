"""Sums, means, losses and parts of rows that the data choose, see `chosen_rows`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...graph import Node, Value, bare
from ...ops.arguments import arguments
from ...ops.op import OPS
from ..rows.rows import Rows

if TYPE_CHECKING:
    from ..rows.chosen_rows import Keeper

EVERY = 2**63 - 1  # torch's end of `[:]`
MEAN, SUM = 1, 2  # at::Reduction
LOSSES = {name for name, op in OPS.items() if op.labels}


def total(keeper: Keeper, node: Node, rows: Rows) -> Value | tuple | None:
    """A sum or mean over the rows."""
    bound, emit = arguments(node), keeper.rewriter.emit
    x, along_rows = bound["self"], keeper.of(bound["self"])
    rank = len(x.shape)
    dims = tuple(d % rank for d in bound.get("dim") or range(rank))
    if along_rows is None or along_rows.dim not in dims:
        return keeper.follow(node, rows)
    counted = keeper.masked(x, rows, along_rows.dim)
    if node.name == "aten.sum":
        return keeper.rewriter.keep(node.with_args(self=counted))
    kind = bound.get("dtype") or x.dtype
    # As torch's mean does: float16 has no count above 65504.
    wide = torch.promote_types(kind, torch.float32)
    keep = bool(bound.get("keepdim", False))
    summed = emit("aten.sum.dim_IntList", counted, dims, keep, dtype=wide)
    others = math.prod(x.shape[d] for d in dims if d != along_rows.dim)
    count = emit("aten.sum.default", rows.chosen)
    if keeper.means:
        count = emit("aten.clamp.default", count, 1)
    count = emit("aten.mul.Tensor", emit("aten.to.dtype", count, wide), others)
    mean = emit("aten.div.Tensor", summed, count)
    if kind == wide or node.out.name in keeper.autocast:  # which makes it wide
        return mean
    return emit("aten.to.dtype", mean, kind)


def reduced(keeper: Keeper, node: Node, rows: Rows) -> Value | tuple | None:
    """A pointwise loss, of which the mean or the sum is taken."""
    shape = torch.broadcast_shapes(*(v.shape for v in node.operands))
    out = replace(node.out, shape=shape)
    each = replace(node.with_args(reduction=0), outs=(out,))
    made = keeper.follow(each, rows)
    if not isinstance(made, tuple) or made[0] is None:
        return None
    op = "aten.mean.default" if node.arg("reduction") == MEAN else "aten.sum.default"
    return total(keeper, replace(node, op=op, args=(made[0],), kwargs={}), rows)


def loss(keeper: Keeper, node: Node, rows: Rows) -> Value | tuple | None:
    """A loss over the rows ignores those that were not chosen."""
    bound = arguments(node)
    target = bound["target"]
    both = [keeper.of(bound["self"]), keeper.of(target)]
    if not all(r and not r.dim for r in both) or len(target.shape) != 1:
        return None
    if target.dtype != torch.int64:
        return None
    ignored = bound["ignore_index"]
    target = keeper.rewriter.emit(
        "aten.where.ScalarOther", rows.chosen, target, ignored
    )
    if keeper.means and bound["reduction"] == 1:
        return _mean_loss(keeper, node.with_args(target=target, reduction=2), rows)
    fresh = keeper.rewriter.keep(node.with_args(target=target))
    if bound["reduction"] == 0 and fresh[0] is not None:
        keeper.noted(fresh[0], rows, 0)
    return fresh


def _mean_loss(keeper: Keeper, node: Node, rows: Rows) -> Value | None:
    """The mean of a summed loss, 0 of no rows."""
    bound, emit = arguments(node), keeper.rewriter.emit
    (summed,) = keeper.rewriter.keep(node)
    if summed is None or bound["weight"] is not None:
        return None
    counted = emit("aten.ne.Scalar", bound["target"], bound["ignore_index"])
    count = emit("aten.sum.default", counted)
    none = emit("aten.eq.Scalar", emit("aten.sum.default", rows.chosen), 0)
    count = emit("aten.to.dtype", emit("aten.add.Tensor", count, none), summed.dtype)
    return emit("aten.div.Tensor", summed, count)


def extreme(keeper: Keeper, node: Node, rows: Rows) -> Value | tuple | None:
    """The largest or smallest number of all, or a norm."""
    x = node.operands[0]
    if len(node.operands) > 1 or node.results[0].shape or not x.dtype.is_floating_point:
        return keeper.follow(node, rows)
    order = node.arg("ord")
    least = {"max": -math.inf, "amax": -math.inf, "min": math.inf, "amin": math.inf}
    if order is not None and order <= 0:
        return None
    other = 0 if order else least[bare(node.op)]
    masked = keeper.masked(x, rows, rows.dim, other)
    return keeper.rewriter.keep(node.with_args(self=masked))


def cut(keeper: Keeper, node: Node, rows: Rows) -> Value | tuple | None:
    """`rows[first:end]`: of those that are chosen."""
    x, dim, first, end, step = arguments(node).values()
    first, end = first or 0, EVERY if end is None else end
    if dim % len(x.shape) != rows.dim or (first, end, step) == (0, EVERY, 1):
        return keeper.follow(node, rows)
    if first < 0 or end < 0 or step != 1:
        return None
    emit, key = keeper.rewriter.emit, (rows.mask, first, end)
    if key not in keeper.cuts:
        place = emit("aten.cumsum.default", rows.chosen, 0)
        later = emit("aten.gt.Scalar", place, first)
        chosen = emit("aten.logical_and.default", rows.chosen, later)
        sooner = emit("aten.le.Scalar", place, end)
        keeper.cuts[key] = emit("aten.logical_and.default", chosen, sooner)
    chosen, out = keeper.cuts[key], emit("aten.alias.default", x)
    own = keeper.rows[x.name]
    keeper.rows[out.name] = replace(own, chosen=chosen, mask=chosen.name)
    return out


REDUCTIONS: Mapping[str, Callable[[Keeper, Node, Rows], Value | tuple | None]] = {
    "aten.sum": total,
    "aten.mean": total,
    **dict.fromkeys(LOSSES, loss),
    **{f"aten.{name}": extreme for name in ("amax", "amin", "max", "min")},
    "aten.linalg_vector_norm": extreme,
    "aten.slice": cut,
}
