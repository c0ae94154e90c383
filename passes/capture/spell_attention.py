"""The normal form of attention: one op, or spelled out where dropout needs it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..capture.causal_masks import causal_window
from ..capture.column_masks import columns_of
from ..capture.rewrite import Rewriter
from ..capture.spell_groups import without_copies
from ..graph import Location, Node, Value
from ..ops.arguments import arguments


def attention(rewriter: Rewriter, node: Node) -> Value:
    """SDPA: a causal mask becomes the flag, one of a sliding window a number with it,
    one of packed documents their ids, one of padding says which columns are none; with
    dropout it is spelled out."""
    given = arguments(node)
    is_causal, scale = bool(given["is_causal"]), given["scale"]
    q, k, v, mask = _with_heads(rewriter, given, node)
    shape = (*q.shape[:-1], v.shape[-1])
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    if (expanded := rewriter.producer(mask, "aten.expand")) is not None:
        mask = expanded.operands[0]  # it broadcasts as it is
    seen: dict[str, Any] = {}
    if mask is not None and mask.dtype == torch.bool:
        known = rewriter.constant(mask)
        window = causal_window(rewriter, mask)
        if known is not None and bool(known.all()):
            mask = None
        elif window == mask.shape[-1]:
            mask, is_causal = None, True
        elif window is not None and given["dropout_p"] == 0.0:
            mask, is_causal, seen = None, True, {"window": window}
        elif known is None and (told := columns_of(rewriter, mask)) is not None:
            columns, where = mask.shape[-1], node.location
            shown = told.shown

            def row(x: Value) -> Value:
                return rewriter.reshape(x, (x.numel // columns, columns), where)

            if not told.window and shown is not None:
                lead = (shown.numel // columns, 1, 1, columns)
                mask = rewriter.reshape(shown, lead, where)
            elif given["dropout_p"] == 0.0:
                known_of = {"documents": told.ids, "shown": shown}
                seen = {name: row(x) for name, x in known_of.items() if x is not None}
                if told.window < columns:
                    seen["window"] = told.window
                mask, is_causal = None, True
    if given["dropout_p"] > 0.0:
        y = _explicit_attention(
            rewriter, node, (q, k, v), mask, is_causal, scale, given["dropout_p"]
        )
    else:
        k, v = without_copies(rewriter, k, v)
        args = (q, k, v, mask, is_causal, scale)
        place: dict[str, Any] = {
            "shape": shape,
            "dtype": q.dtype,
            "where": node.location,
        }
        y = rewriter.emit("autopar.attention", *args, **seen, **place)
    return rewriter.reshape(y, node.out.shape, node.location)


def _with_heads(
    rewriter: Rewriter, given: dict[str, Any], node: Node
) -> tuple[Value, Value, Value, Value | None]:
    """q, k, v as [b, h, s, e], and the mask to go with them.

    Of three dims the first may be that of samples, or of samples and heads together: in
    which case it is seen as both, as it was before. More than four become four.
    """
    qkv = given["query"], given["key"], given["value"]
    mask, where = given["attn_mask"], node.location
    if len(qkv[0].shape) != 4:
        common = torch.broadcast_shapes(*(x.shape[:-2] for x in qkv))
        lead = _heads_apart(rewriter, qkv, common)
        qkv = _map(
            lambda x: rewriter.reshape(
                _expand(rewriter, x, (*common, *x.shape[-2:]), where),
                (*lead, *x.shape[-2:]),
                where,
            ),
            qkv,
        )
        if mask is not None and len(mask.shape) > 2:
            mask = _with_lead(rewriter, mask, common, lead, node)
    samples = max(x.shape[0] for x in qkv)
    q, k, v = _map(lambda x: _expand(rewriter, x, (samples, *x.shape[1:]), where), qkv)
    return q, k, v, mask


Three = tuple[Value, Value, Value]


def _map(change: Callable[[Value], Value], qkv: Three) -> Three:
    q, k, v = qkv
    return change(q), change(k), change(v)


def _heads_apart(
    rewriter: Rewriter, qkv: Three, common: tuple[int, ...]
) -> tuple[int, int]:
    """The samples and heads that leading dims stand for."""
    if len(common) != 1:
        return (math.prod(common[:-1]), common[-1]) if common else (1, 1)
    found = set()
    for x in qkv:
        view = rewriter.producer(x, "aten.reshape")
        before = view.operands[0].shape if view is not None else ()
        apart = len(before) == 4 and before[2:] == x.shape[1:]
        found.add(before[:2] if apart else None)
    (lead,) = found if len(found) == 1 else {None}
    return (lead[0], lead[1]) if lead is not None else (common[0], 1)


def _with_lead(
    rewriter: Rewriter,
    mask: Value,
    common: tuple[int, ...],
    lead: tuple[int, int],
    node: Node,
) -> Value:
    """A mask whose leading dims broadcast to `common`, for `lead` instead."""
    *own, rows, columns = mask.shape
    if math.prod(own) > 1:
        mask = _expand(rewriter, mask, (*common, rows, columns), node.location)
        return rewriter.reshape(mask, (*lead, rows, columns), node.location)
    return rewriter.reshape(mask, (1, 1, rows, columns), node.location)


def _expand(
    rewriter: Rewriter, x: Value, shape: tuple[int, ...], where: Location
) -> Value:
    if x.shape == shape:
        return x
    op = "aten.expand.default"
    return rewriter.emit(op, x, shape, shape=shape, dtype=x.dtype, where=where)


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
    where, rows, columns = node.location, q.shape[-2], k.shape[-2]
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
        if mask.dtype != q.dtype:
            mask = emit("aten.to.dtype", mask, q.dtype, shape=mask.shape)
        scores = emit("aten.add.Tensor", scores, mask, shape=square)
    weights = emit("aten.softmax.int", scores, -1, shape=square)
    if given is not None and given.dtype == torch.bool:  # a row may attend to nothing
        weights = emit("aten.masked_fill.Scalar", weights, hidden, 0.0, shape=square)
    weights = emit_dropout(rewriter, weights, p, node)
    return emit("aten.matmul.default", weights, v, shape=(*q.shape[:-1], v.shape[-1]))


def _repeat_heads(rewriter: Rewriter, x: Value, heads: int, node: Node) -> Value:
    """[b, kv_heads, s, d] -> [b, heads, s, d] for grouped queries."""
    batch, groups, seq, width = x.shape
    shape = (batch, groups, heads // groups, seq, width)
    x = rewriter.reshape(x, (batch, groups, 1, seq, width), node.location)
    x = rewriter.emit(
        "aten.expand.default", x, shape, shape=shape, dtype=x.dtype, where=node.location
    )
    return rewriter.reshape(x, (batch, heads, seq, width), node.location)


def emit_dropout(rewriter: Rewriter, x: Value, p: float, node: Node) -> Value:
    return rewriter.emit(
        "autopar.dropout",
        x,
        p,
        shape=x.shape,
        dtype=x.dtype,
        where=node.location,
    )
