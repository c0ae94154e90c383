"""Losses that torch adds up itself, as a loss of each element and the sum of these.

A sum may stay pending over ranks and microbatches, and its number of terms is known:
so the mean of a loss is separable, whatever the loss of an element is.
"""

from __future__ import annotations

from ..capture.rewrite import Rewriter, Rule
from ..graph import Node, Value
from ..ops.arguments import arguments, call

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction

# Losses with an argument `reduction`, each of whose means is that of its elements.
REDUCED = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
)


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


REDUCED_RULES: dict[str, Rule] = {f"aten.{name}": reduced for name in REDUCED}
