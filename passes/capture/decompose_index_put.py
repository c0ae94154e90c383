"""Writes into what a mask chooses, in a spelling that shards can follow."""

from __future__ import annotations

import torch

from ..capture.rewrite import Rewriter
from ..graph import Node, Value
from ..ops.arguments import arguments


def index_put(rewriter: Rewriter, node: Node) -> Value | None:
    """`x[..., mask] = values`: each element is its value or what it was.

    values: broadcast to [..., chosen, *rest]. How many a mask chooses is not asked for,
    as torch does (`nonzero`): an element gets as many-eth a value as were chosen
    before it.
    """
    x, indices, values, accumulate = arguments(node).values()
    masks = [i for i in indices if i is not None]
    if accumulate or len(masks) != 1 or masks[0].dtype != torch.bool:
        return None
    (mask,), first = masks, indices.index(masks[0])
    rest = x.shape[first + len(mask.shape) :]
    if len(values.shape) > len(rest):
        values = _in_places(rewriter, mask, values, len(values.shape) - len(rest) - 1)
    shape = (*mask.shape, *(1 for _ in rest))
    return rewriter.like(
        node, "aten.where.self", rewriter.reshape(mask, shape), values, x
    )


def _in_places(rewriter: Rewriter, mask: Value, values: Value, along: int) -> Value:
    """Values of the chosen elements, in dim `along`, where these are in the mask."""
    chosen = rewriter.reshape(mask, (mask.numel,))
    number = rewriter.emit("aten.cumsum.default", chosen, 0)
    number = rewriter.emit("aten.sub.Tensor", number, 1)
    number = rewriter.emit("aten.clamp.default", number, 0, values.shape[along] - 1)
    placed = rewriter.emit("aten.index_select.default", values, along, number)
    shape = values.shape
    return rewriter.reshape(placed, (*shape[:along], *mask.shape, *shape[along + 1 :]))
