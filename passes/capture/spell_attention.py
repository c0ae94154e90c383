"""The normal form of attention: one op, or spelled out where dropout needs it."""

from __future__ import annotations

import math
from typing import Any

import torch

from passes.arguments import arguments
from passes.capture.rewrite import Rewriter
from passes.capture.spell_groups import without_copies
from passes.graph import Node, Value


def attention(rewriter: Rewriter, node: Node) -> Value:
    """SDPA: a causal mask becomes the flag; with dropout it is spelled out."""
    given = arguments(node)
    q, k, v = given["query"], given["key"], given["value"]
    mask, is_causal, scale = given["attn_mask"], given["is_causal"], given["scale"]
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    if (expanded := rewriter.producer(mask, "aten.expand")) is not None:
        mask = expanded.operands[0]  # it broadcasts as it is
    known = rewriter.constant(mask) if mask is not None else None
    if known is not None and known.dtype == torch.bool:
        square = known.shape[-2] == known.shape[-1]
        if bool(known.all()):
            mask = None
        elif square and torch.equal(known, torch.ones_like(known).tril()):
            mask, is_causal = None, True
    if given["dropout_p"] > 0.0:
        return _explicit_attention(
            rewriter, node, (q, k, v), mask, is_causal, scale, given["dropout_p"]
        )
    k, v = without_copies(rewriter, k, v)
    return rewriter.emit(
        "autopar.attention",
        q,
        k,
        v,
        mask,
        is_causal,
        scale,
        shape=node.out.shape,
        dtype=q.dtype,
        where=node.where,
    )


def _explicit_attention(
    rewriter: Rewriter,
    node: Node,
    qkv: tuple[Value, Value, Value],
    mask: Value | None,
    is_causal: bool,
    scale: float,
    p: float,
) -> Value:
    """softmax(q k^T * scale + mask) with dropout, times v."""
    q, k, v = qkv
    given = mask
    where, rows, columns = node.where, q.shape[-2], k.shape[-2]
    square = (*q.shape[:-1], columns)

    def emit(op: str, *args: Any, shape: tuple[int, ...], dtype: Any = None) -> Value:
        return rewriter.emit(
            op, *args, shape=shape, dtype=dtype or q.dtype, where=where
        )

    if k.shape[1] != q.shape[1]:
        k, v = (_repeat_heads(rewriter, x, q.shape[1], node) for x in (k, v))
    turned = (*k.shape[:-2], k.shape[-1], k.shape[-2])
    kt = emit("aten.transpose.int", k, -2, -1, shape=turned)
    scores = emit("aten.matmul.default", q, kt, shape=square)
    scores = emit("aten.mul.Tensor", scores, scale, shape=square)
    if is_causal:
        ones = (rows, columns)
        allowed = rewriter.factory(
            "ones", ones, shape=ones, dtype=torch.bool, where=where
        )
        mask = emit("aten.tril.default", allowed, shape=ones, dtype=torch.bool)
    if mask is not None and mask.dtype == torch.bool:
        hidden = emit(
            "aten.logical_not.default", mask, shape=mask.shape, dtype=torch.bool
        )
        scores = emit(
            "aten.masked_fill.Scalar", scores, hidden, -math.inf, shape=square
        )
    elif mask is not None:
        scores = emit("aten.add.Tensor", scores, mask, shape=square)
    weights = emit("aten.softmax.int", scores, -1, shape=square)
    if given is not None and given.dtype == torch.bool:  # a row may attend to nothing
        weights = emit("aten.masked_fill.Scalar", weights, hidden, 0.0, shape=square)
    weights = emit_dropout(rewriter, weights, p, node)
    return emit("aten.matmul.default", weights, v, shape=node.out.shape)


def _repeat_heads(rewriter: Rewriter, x: Value, heads: int, node: Node) -> Value:
    """[b, kv_heads, s, d] -> [b, heads, s, d] for grouped queries."""
    batch, groups, seq, width = x.shape
    shape = (batch, groups, heads // groups, seq, width)
    x = rewriter.reshape(x, (batch, groups, 1, seq, width), node.where)
    x = rewriter.emit(
        "aten.expand.default", x, shape, shape=shape, dtype=x.dtype, where=node.where
    )
    return rewriter.reshape(x, (batch, heads, seq, width), node.where)


def emit_dropout(rewriter: Rewriter, x: Value, p: float, node: Node) -> Value:
    return rewriter.emit(
        "autopar.dropout",
        x,
        p,
        shape=x.shape,
        dtype=x.dtype,
        where=node.where,
    )
