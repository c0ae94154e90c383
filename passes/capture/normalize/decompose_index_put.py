"""Writes into what a mask or numbers choose, in a spelling that shards can follow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...graph import Node, Value
from ...ops.arguments import arguments
from ...rewrite import Rewriter
from ..normalize.decompose_index import own_places, spread
from ..rows.masked_rows import in_places, row_mask, set_where


def index_put(rewriter: Rewriter, node: Node) -> Value | None:
    """`x[...] = values` with tensors in the brackets."""
    x, indices, values, accumulate = arguments(node).values()
    masks = [i for i in indices if i is not None]
    if len(masks) == 1 and masks[0].dtype == torch.bool and not accumulate:
        return _by_mask(rewriter, node, x, indices, values)
    return _each_in_its_own(rewriter, node, x, indices, values)


def masked_scatter(rewriter: Rewriter, node: Node) -> Value:
    """`x.masked_scatter(mask, values)`: of whole rows where the mask chooses these, as
    images' tokens in a text, else of elements."""
    x, mask, values = arguments(node).values()
    mask = row_mask(rewriter, mask, x.shape)
    if values.numel % math.prod(x.shape[len(mask.shape) :]):  # with some left over
        mask = rewriter.expand(node.arg("mask"), x.shape)
    rest = x.shape[len(mask.shape) :]
    values = rewriter.reshape(values, (values.numel // math.prod(rest), *rest))
    return set_where(rewriter, mask, in_places(rewriter, mask, values), x)


def _each_in_its_own(
    rewriter: Rewriter,
    node: Node,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
) -> Value | None:
    """`x[arange(b), i] = values` scatters along the dim after those that are counted
    through. Mixtures of depths write rows back this way that a router chose.

    values: broadcast to [*those of all indices together, *rest].
    """
    places = own_places(rewriter, x, indices)
    if places is None:
        return None
    (along, index), rest = places, x.shape[len(indices) :]
    values = rewriter.expand(values, (*index.shape, *rest))
    shape = (*index.shape[:along], math.prod(index.shape[along:]), *rest)
    values = rewriter.reshape(values, shape)
    op = "scatter_add.default" if node.arg("accumulate") else "scatter.src"
    index = spread(rewriter, index, along, rest)
    return rewriter.like(node, f"aten.{op}", x, along, index, values)


def _by_mask(
    rewriter: Rewriter,
    node: Node,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
) -> Value:
    """`x[..., mask] = values`: each element is its value or what it was.

    values: broadcast to [..., chosen, *rest].
    """
    first, mask = next((i, m) for i, m in enumerate(indices) if m is not None)
    rest = x.shape[first + len(mask.shape) :]
    if len(values.shape) > len(rest):
        values = in_places(rewriter, mask, values, len(values.shape) - len(rest) - 1)
    shape = (*mask.shape, *(1 for _ in rest))
    return rewriter.like(
        node, "aten.where.self", rewriter.reshape(mask, shape), values, x
    )
