"""Grouped queries, recognized: attention reads each head of keys once.

Models repeat keys and values for all queries of their group before they attend to them
(Ainslie 2023, arXiv 2305.13245). Attention itself knows groups; without the copies less
is kept for the backward, and less is gathered, exchanged, or passed round.
"""

from __future__ import annotations

from ...graph import Node, Value
from ...rewrite import Rewriter

HEADS = 1  # the dim of keys and values that has their heads


def without_copies(rewriter: Rewriter, k: Value, v: Value) -> tuple[Value, Value]:
    """[b, heads, t, e] -> [b, kv_heads, t, e], where a model repeated each head of both
    as often; as they are, where it did not."""
    one, other = (_before_repeat(rewriter, x, HEADS) for x in (k, v))
    if one is None or other is None or one.shape[HEADS] != other.shape[HEADS]:
        return k, v
    return one, other


def repeat_interleave(rewriter: Rewriter, node: Node) -> Value | None:
    """A constant number of repeats along a dim -> an expand."""
    x, times, dim = node.named("self repeats dim")
    if not isinstance(times, int):
        return None
    if dim is None:
        x, dim = rewriter.reshape(x, (x.numel,)), 0
    after = dim % len(x.shape) + 1
    before, rest = x.shape[:after], x.shape[after:]
    apart = rewriter.reshape(x, (*before, 1, *rest))
    copies = rewriter.expand(apart, (*before, times, *rest))
    return rewriter.reshape(copies, node.out.shape)


def _before_repeat(rewriter: Rewriter, x: Value, dim: int) -> Value | None:
    """x before each entry along a dim was repeated, all copies in a row, with later
    views and casts of x; None if it was not repeated."""
    if (merged := rewriter.producer(x, "aten.reshape")) is not None:
        return _before_expand(rewriter, merged, dim)
    node = rewriter.producer(x, "aten.transpose", "aten.to")
    if node is None:
        return None
    before = dim
    if node.op.startswith("aten.transpose"):
        one, other = (node.arg(d) % len(x.shape) for d in ("dim0", "dim1"))
        before = {one: other, other: one}.get(dim, dim)
    single = _before_repeat(rewriter, node.operands[0], before)
    if single is None:
        return None
    return rewriter.again(node, self=single)


def _before_expand(rewriter: Rewriter, merged: Node, dim: int) -> Value | None:
    """x of `x[..., g, 1, ...].expand(..., g, n, ...).reshape(..., g * n, ...)`."""
    copies = rewriter.producer(merged.operands[0], "aten.expand")
    if copies is None:
        return None
    single, shape = copies.operands[0], copies.out.shape
    once = (*shape[: dim + 1], 1, *shape[dim + 2 :])
    joined = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
    if single.shape != once or merged.out.shape != joined:
        return None
    return rewriter.reshape(single, (*once[: dim + 1], *once[dim + 2 :]))
