"""Experts, recognized: each token times the weight of the expert that it chose.

Hugging Face's `batched_mm` experts look up a whole weight matrix for every token and
multiply in a batch, which takes as much memory as there are tokens and weights. As one
op it takes none: tokens of one expert are brought together
(`autopar.runtime.kernels.experts`), and an axis may split the experts.
"""

from __future__ import annotations

import torch

from ..capture.rewrite import Rewriter
from ..graph import Node, Value
from ..ops.arguments import arguments


def looked_up_product(rewriter: Rewriter, node: Node) -> Value | None:
    """bmm(w[expert], x[..., None]) or bmm(x[:, None], w[expert]) -> expert_linear."""
    left, right = node.operands
    if right.shape[2] == 1 and (lookup := _looked_up(rewriter, left)):
        weight, expert = lookup
        return _emit(rewriter, node, right, expert, weight)
    if left.shape[1] == 1 and (lookup := _looked_up(rewriter, right)):
        weight, expert = lookup
        turned = rewriter.emit("aten.transpose.int", weight, 1, 2)
        return _emit(rewriter, node, left, expert, turned)
    return None


def grouped_product(rewriter: Rewriter, node: Node) -> Value | None:
    """Rows in the order of their experts, `_grouped_mm(x, w, ends)` -> expert_linear.

    ends: int [experts], where the rows of each end.
    """
    x, weight, ends, *others = arguments(node).values()
    if len(x.shape) != 2 or ends is None or any(o is not None for o in others):
        return None
    rows = rewriter.emit("aten.arange.default", x.shape[0], dtype=ends.dtype)
    expert = rewriter.emit("aten.searchsorted.Tensor", ends, rows, right=True)
    turned = rewriter.emit("aten.transpose.int", weight, 1, 2)
    return _emit(rewriter, node, x, expert, turned)


def choice(rewriter: Rewriter, node: Node) -> tuple[Value, Value] | None:
    """topk along the last dim -> what is chosen, and its scores looked up: so that
    whoever compares programs can tell them what to choose."""
    x, k, rank = node.operands[0], node.arg("k"), len(node.operands[0].shape)
    if not rank or node.arg("dim") % rank != rank - 1 or not node.arg("largest"):
        return None
    chosen = rewriter.emit("autopar.choose", x, k)
    scores = rewriter.emit("aten.gather.default", x, -1, chosen)
    return scores, chosen


def _emit(
    rewriter: Rewriter, node: Node, rows: Value, expert: Value, weight: Value
) -> Value:
    """rows: [tokens, k] with a dim of 1 somewhere. weight: [experts, n, k]."""
    rows = rewriter.reshape(rows, (rows.shape[0], weight.shape[2]))
    y = rewriter.emit("autopar.expert_linear", rows, expert, weight)
    return rewriter.reshape(y, node.out.shape)


def _looked_up(rewriter: Rewriter, x: Value) -> tuple[Value, Value] | None:
    """(weight, expert) of weight[expert]: [experts, n, k] and int64 [tokens]."""
    node = rewriter.producer(x, "aten.index")
    if node is None or len(node.arg("indices")) != 1:
        return None
    weight, (expert,) = node.named("self indices")
    if len(weight.shape) == 3 and expert.dtype == torch.int64:
        return (weight, expert) if len(expert.shape) == 1 else None
    return None
