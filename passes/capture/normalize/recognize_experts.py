"""Experts, recognized: each token times the weight of the expert that it chose.

Hugging Face's `batched_mm` experts look up a whole weight matrix for every token and
multiply in a batch, which takes as much memory as there are tokens and weights. As one
op it takes none: tokens of one expert are brought together
(`autopar.runtime.kernels.experts`), and an axis may split the experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...graph import Node, Value
from ...ops.arguments import arguments
from ...rewrite import Rewriter

# Rows in the order of their experts.
PRODUCTS = ("aten._grouped_mm", "transformers.grouped_mm_fallback")


def looked_up_product(rewriter: Rewriter, node: Node) -> Value | None:
    """w[expert] @ x[..., None] or x[..., None, :] @ w[expert], of as many matrices as
    `expert` has elements -> expert_linear. Of bmm and matmul."""
    if len(node.operands) != 2 or any(len(v.shape) < 3 for v in node.operands):
        return None
    left, right = node.operands
    if right.shape[-1] == 1 and (lookup := _looked_up(rewriter, left)):
        x, side = rewriter.reshape(right, right.shape[:-1]), 1
    elif left.shape[-2] == 1 and (lookup := _looked_up(rewriter, right)):
        x, side = rewriter.reshape(left, (*left.shape[:-2], left.shape[-1])), 0
    else:
        return None
    lead = lookup.expert.shape
    if len(x.shape) > len(lead) + 1 or node.out.shape[:-2] != lead:
        return None
    return rewriter.reshape(lookup.times(rewriter, x, side), node.out.shape)


def looked_up_einsum(rewriter: Rewriter, node: Node) -> Value | None:
    """einsum("tk,tenk->ten", x, w[expert]) -> expert_linear, with any letters in any
    order, if each row of x meets one matrix of its own for each expert that it chose.

    gpt-fast, mixtral-moe/model.py, and OpenAI's gpt_oss/torch/model.py write it so.
    """
    text = node.arg("equation").replace(" ", "")
    inputs, arrow, out = text.partition("->")
    if not arrow or "." in text or len(node.operands) != 2:
        return None
    pairs = list(zip(inputs.split(","), node.operands, strict=True))
    for (of_x, x), (of_w, w) in (pairs, pairs[::-1]):
        if (lookup := _looked_up(rewriter, w)) is None:
            continue
        lead = of_w[:-2]
        summed = [c for c in of_w[-2:] if c in of_x and c not in out]
        free = [c for c in of_w[-2:] if c in out and c not in of_x]
        if len(summed) != 1 or len(free) != 1 or set(out) != {*lead, *free}:
            continue
        # All letters once, and x without any that w has not.
        once = all(len(set(letters)) == len(letters) for letters in (of_x, of_w, out))
        if not once or not set(of_x) <= {*lead, *summed}:
            continue
        order = [c for c in (*lead, *summed) if c in of_x]
        x = _turned(rewriter, x, of_x, order)
        extents = dict(zip(order, x.shape, strict=True))
        x = rewriter.reshape(x, [extents.get(c, 1) for c in (*lead, *summed)])
        y = lookup.times(rewriter, x, of_w[-2:].index(summed[0]))
        return _turned(rewriter, y, [*lead, *free], out)
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
    return Lookup(weight, expert).times(rewriter, x, side=0)


def looked_up_bias(rewriter: Rewriter, node: Node) -> Value | None:
    """y + b[expert], of y a product with the weights of the same experts: the bias is
    the weight of one more input, 1, so that where rows went to their experts it is
    added there. Of aten.add."""
    if len(node.operands) != 2 or node.kwargs or len(node.args) != 2:
        return None
    for y, b in (node.operands, node.operands[::-1]):
        product = rewriter.producer(_unseen(rewriter, y), "autopar.expert_linear")
        bias, expert = _looked_up_rows(rewriter, _unseen(rewriter, b))
        if product is None or bias is None:
            continue
        of = product.arg("expert")
        if expert is None or expert.dtype != torch.int64 or len(bias.shape) != 2:
            continue
        rows = (*expert.shape, bias.shape[1])
        if (
            not y.shape == b.shape == node.out.shape
            or bias.dtype != y.dtype
            or math.prod(rows) != y.numel
        ):
            continue
        if _unseen(rewriter, expert) != _unseen(rewriter, of):
            continue
        ones = rewriter.emit("aten.eq.Tensor", of, of)
        ones = rewriter.emit("aten.to.dtype", ones, bias.dtype)
        ones = rewriter.reshape(ones, (*of.shape, 1))
        column = rewriter.reshape(bias, (*bias.shape, 1))
        added = rewriter.emit("autopar.expert_linear", ones, of, column)
        y = rewriter.emit("aten.add.Tensor", product.out, added)
        return rewriter.reshape(y, node.out.shape)
    return None


def _looked_up_rows(
    rewriter: Rewriter, x: Value
) -> tuple[Value, Value] | tuple[None, None]:
    """(table, rows) of a look-up `table[rows]`; (None, None) of other values."""
    if (node := rewriter.producer(x, "aten.embedding")) is not None:
        plain = node.arg("padding_idx") < 0
        return (node.arg("weight"), node.arg("indices")) if plain else (None, None)
    node = rewriter.producer(x, "aten.index")
    if node is None or len(node.arg("indices")) != 1:
        return None, None
    table, (rows,) = node.named("self indices")
    return table, rows


def _unseen(rewriter: Rewriter, x: Value) -> Value:
    """The value that x is a view of, with all of its elements in order."""
    while (view := rewriter.producer(x, "aten.reshape", "aten.select")) is not None:
        if view.operands[0].numel != x.numel:
            break
        x = view.operands[0]
    return x


def choice(rewriter: Rewriter, node: Node) -> tuple[Value, Value] | None:
    """topk along the last dim -> what is chosen, and its scores looked up: so that
    whoever compares programs can tell them what to choose."""
    x, k, rank = node.operands[0], node.arg("k"), len(node.operands[0].shape)
    if not rank or node.arg("dim") % rank != rank - 1 or not node.arg("largest"):
        return None
    chosen = rewriter.emit("autopar.choose", x, k)
    scores = rewriter.emit("aten.gather.default", x, -1, chosen)
    return scores, chosen


@dataclass(frozen=True)
class Lookup:
    """weight[expert], of weight [experts, n, k] and int64 expert [...]."""

    weight: Value
    expert: Value

    def times(self, rewriter: Rewriter, x: Value, side: int) -> Value:
        """x [..., k], whose dims before k broadcast to those of `expert`, times the
        matrix of each -> [..., n]. side: 1 if the last dim of a matrix is summed over,
        0 if it is the one before."""
        lead, (_, *sides) = self.expert.shape, self.weight.shape
        rows = rewriter.expand(x, (*lead, sides[side]))
        rows = rewriter.reshape(rows, (math.prod(lead), sides[side]))
        expert = rewriter.reshape(self.expert, (math.prod(lead),))
        weight = self.weight
        if not side:
            weight = rewriter.transpose(weight, 1, 2)
        y = rewriter.emit("autopar.expert_linear", rows, expert, weight)
        return rewriter.reshape(y, (*lead, sides[1 - side]))


def _looked_up(rewriter: Rewriter, x: Value) -> Lookup | None:
    """The look-up that x is, or is a view of with as many matrices."""
    view = rewriter.producer(x, "aten.reshape")
    looked_up = view.operands[0] if view is not None else x
    node = rewriter.producer(looked_up, "aten.index")
    if node is None or len(node.arg("indices")) != 1:
        return None
    weight, (expert,) = node.named("self indices")
    if len(weight.shape) != 3 or expert is None or expert.dtype != torch.int64:
        return None
    if x.shape[-2:] != weight.shape[1:] or len(x.shape) < 3:
        return None
    return Lookup(weight, rewriter.reshape(expert, x.shape[:-2]))


def _turned(
    rewriter: Rewriter, x: Value, letters: Sequence[str], order: Sequence[str]
) -> Value:
    """x with its dims, which have these letters, in this order of them."""
    dims = tuple(letters.index(c) for c in order)
    if dims == tuple(range(len(dims))):
        return x
    return rewriter.emit("aten.permute.default", x, dims)
