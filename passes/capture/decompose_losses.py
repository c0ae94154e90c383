"""Losses that torch adds up itself, as a loss of each element and the sum of these.

A sum may stay pending over ranks and microbatches, and its number of terms is known:
so the mean of a loss is separable, whatever the loss of an element is.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..capture.rewrite import Rewriter, Rule
from ..graph import Node, Value, map_values, resolve
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
    given = arguments(node)
    reduction = given["reduction"]
    if reduction not in (MEAN, SUM):
        return None
    args, kwargs = call(node.op, {**given, "reduction": NONE})
    dtype, where = node.out.dtype, node.location
    name = node.op.split(".")[1]
    each = Node(node.op, args, kwargs, (), where)
    loss = rewriter.builder.value(name, _shape(each), dtype)
    each = Node(node.op, args, kwargs, (loss,), where)
    rewriter.builder.nodes.append(each)
    rewriter.made[loss.name] = each
    total = rewriter.emit(
        "aten.sum.default", loss, shape=(), dtype=dtype, where=where, name="total"
    )
    if reduction == SUM:
        return total
    share = 1.0 / max(1, loss.numel)
    return rewriter.emit(
        "aten.mul.Tensor", total, share, shape=(), dtype=dtype, where=where, name="loss"
    )


def _shape(node: Node) -> tuple[int, ...]:
    """The shape of a node's result, found by running it on tensors without data."""
    with FakeTensorMode(), torch.no_grad():
        args, kwargs = map_values(
            lambda v: torch.empty(v.shape, dtype=v.dtype),
            (node.args, dict(node.kwargs)),
        )
        return tuple(resolve(node.op)(*args, **kwargs).shape)


REDUCED_RULES: dict[str, Rule] = {f"aten.{name}": reduced for name in REDUCED}
