"""Losses that torch adds up itself, as a loss of each element and the sum of these.

A sum may stay pending over ranks and microbatches, and its number of terms is known:
so the mean of a loss is separable, whatever the loss of an element is.
"""

from __future__ import annotations

from ..capture.rewrite import Rewriter, Rule
from ..graph import Node, Value
from ..ops.arguments import arguments, call
from ..ops.op import OPS

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


def reduced(rewriter: Rewriter, node: Node) -> Value | None:
    """Replaces a loss's sum or mean by that of its unreduced form."""
    bound = arguments(node)
    reduction = bound["reduction"]
    if reduction not in (MEAN, SUM):
        return None
    args, kwargs = call(node.op, {**bound, "reduction": NONE})
    loss = rewriter.emit(node.op, *args, **kwargs)
    total = rewriter.emit("aten.sum.default", loss, name="total")
    if reduction == SUM:
        return total
    share = 1.0 / max(1, loss.numel)
    return rewriter.emit("aten.mul.Tensor", total, share, name="loss")


# Each mean is that of the elements, but where labels may be ignored.
REDUCED_RULES: dict[str, Rule] = {
    name: reduced
    for name, op in OPS.items()
    if name.startswith("aten.") and "reduction" in op.heeds and not op.labels
}
