"""The normal form of attention: one op, or decomposed where dropout needs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...graph import Node, Value
from ...ops.arguments import arguments
from ...rewrite import Rewriter
from ..normalize.causal_masks import causal_window
from ..normalize.column_masks import Columns, columns_of
from ..normalize.grouped_queries import without_copies


@dataclass(frozen=True)
class Shown:
    """The columns that rows of attention see: those of a mask, and none behind their
    own if it is causal. known: more arguments of the op, in place of a mask."""

    mask: Value | None
    is_causal: bool = False
    known: Mapping[str, Any] = field(default_factory=dict)


def attention(rewriter: Rewriter, node: Node) -> Value:
    """SDPA: a causal mask becomes the flag, one of a sliding window a number with it,
    one of packed documents their ids, one of padding says which columns are none; with
    dropout it is decomposed."""
    bound = arguments(node)
    is_causal, p, scale = bool(bound["is_causal"]), bound["dropout_p"], bound["scale"]
    q, k, v, mask = _with_heads(rewriter, bound)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    if (expanded := rewriter.producer(mask, "aten.expand")) is not None:
        mask = expanded.operands[0]  # it broadcasts as it is
    if mask is None:
        shown = Shown(None, is_causal)
    else:
        if is_causal:  # as torch's fused kernel takes both
            mask = _also_causal(rewriter, mask, q.shape[2], k.shape[2])
        shown = _shown_by(rewriter, mask, fused=p == 0.0)
    if p > 0.0:
        y = _decompose_attention(rewriter, (q, k, v), shown, scale, p)
    else:
        k, v = without_copies(rewriter, k, v)
        args = (q, k, v, shown.mask, shown.is_causal, scale)
        y = rewriter.emit("autopar.attention", *args, **shown.known)
    return rewriter.reshape(y, node.out.shape)


def _shown_by(rewriter: Rewriter, mask: Value, fused: bool) -> Shown:
    """The shortest form of a mask. fused: for the op, which takes windows and
    documents; decomposed, attention takes masks and the flag alone."""
    window = causal_window(rewriter, mask)
    if window == mask.shape[-1]:
        return Shown(None, is_causal=True)
    if window is not None:
        return Shown(None, True, {"window": window}) if fused else Shown(mask)
    is_bool, known = mask.dtype == torch.bool, rewriter.constant(mask)
    if known is not None:
        return Shown(None if bool((known == is_bool).all()) else mask)
    columns = columns_of(rewriter, mask) if is_bool else None
    return (
        Shown(mask) if columns is None else _by_columns(rewriter, mask, columns, fused)
    )


def _by_columns(
    rewriter: Rewriter, mask: Value, columns: Columns, fused: bool
) -> Shown:
    """The form of a mask whose columns differ by documents and padding."""
    width = mask.shape[-1]

    def by_sample(x: Value) -> Value:
        return rewriter.reshape(x, (x.numel // width, width))

    if not columns.window and columns.shown is not None:
        samples = columns.shown.numel // width
        return Shown(rewriter.reshape(columns.shown, (samples, 1, 1, width)))
    if not fused:
        return Shown(mask)
    values = {"documents": columns.ids, "shown": columns.shown}
    known: dict[str, Any] = {
        k: by_sample(x) for k, x in values.items() if x is not None
    }
    if columns.window < width:
        known["window"] = columns.window
    return Shown(None, True, known)


def _also_causal(rewriter: Rewriter, mask: Value, rows: int, columns: int) -> Value:
    """A mask that hides what comes later, too."""
    emit = rewriter.emit
    before = emit("aten.ones.default", (rows, columns), dtype=torch.bool)
    before = emit("aten.tril.default", before)
    if mask.dtype == torch.bool:
        return emit("aten.logical_and.default", mask, before)
    return emit("aten.where.ScalarOther", before, mask, -math.inf)


def _with_heads(
    rewriter: Rewriter, bound: dict[str, Any]
) -> tuple[Value, Value, Value, Value | None]:
    """q, k, v as [b, h, s, e], and the mask to go with them.

    Of three dims the first may be that of samples, or of samples and heads together: in
    which case it is seen as both, as it was before. More than four become four.
    """
    qkv = bound["query"], bound["key"], bound["value"]
    mask = bound["attn_mask"]
    if len(qkv[0].shape) != 4:
        common = torch.broadcast_shapes(*(x.shape[:-2] for x in qkv))
        lead = _heads_apart(rewriter, qkv, common)
        qkv = _map(
            lambda x: rewriter.reshape(
                rewriter.expand(x, (*common, *x.shape[-2:])), (*lead, *x.shape[-2:])
            ),
            qkv,
        )
        if mask is not None and len(mask.shape) > 2:
            mask = _with_lead(rewriter, mask, common, lead)
    samples = max(x.shape[0] for x in qkv)
    q, k, v = _map(lambda x: rewriter.expand(x, (samples, *x.shape[1:])), qkv)
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
    leads = set()
    for x in qkv:
        view = rewriter.producer(x, "aten.reshape")
        before = view.operands[0].shape if view is not None else ()
        apart = len(before) == 4 and before[2:] == x.shape[1:]
        leads.add(before[:2] if apart else None)
    (lead,) = leads if len(leads) == 1 else {None}
    return (lead[0], lead[1]) if lead is not None else (common[0], 1)


def _with_lead(
    rewriter: Rewriter, mask: Value, common: tuple[int, ...], lead: tuple[int, int]
) -> Value:
    """A mask whose leading dims broadcast to `common`, for `lead` instead."""
    *own, rows, columns = mask.shape
    if math.prod(own) > 1:
        mask = rewriter.expand(mask, (*common, rows, columns))
        return rewriter.reshape(mask, (*lead, rows, columns))
    return rewriter.reshape(mask, (1, 1, rows, columns))


def _decompose_attention(
    rewriter: Rewriter,
    qkv: Three,
    shown: Shown,
    scale: float,
    p: float,
) -> Value:
    """softmax(q k^T * scale + mask) with dropout, times v."""
    (q, k, v), mask, emit = qkv, shown.mask, rewriter.emit
    hides = mask is not None and mask.dtype == torch.bool
    if k.shape[1] != q.shape[1]:
        k, v = (_repeat_heads(rewriter, x, q.shape[1]) for x in (k, v))
    scores = emit("aten.matmul.default", q, emit("aten.transpose.int", k, -2, -1))
    scores = emit("aten.mul.Tensor", scores, scale)
    if shown.is_causal:
        shape = scores.shape[-2:]
        allowed = emit("aten.ones.default", shape, dtype=torch.bool)
        mask = emit("aten.tril.default", allowed)
    if mask is not None and mask.dtype == torch.bool:
        hidden = emit("aten.logical_not.default", mask)
        scores = emit("aten.masked_fill.Scalar", scores, hidden, -math.inf)
    elif mask is not None:
        if mask.dtype != q.dtype:
            mask = emit("aten.to.dtype", mask, q.dtype)
        scores = emit("aten.add.Tensor", scores, mask)
    weights = emit("aten.softmax.int", scores, -1)
    if hides:  # a row may attend to nothing
        weights = emit("aten.masked_fill.Scalar", weights, hidden, 0.0)
    return emit("aten.matmul.default", emit_dropout(rewriter, weights, p), v)


def _repeat_heads(rewriter: Rewriter, x: Value, heads: int) -> Value:
    """[b, kv_heads, s, d] -> [b, heads, s, d] for grouped queries."""
    batch, groups, seq, width = x.shape
    x = rewriter.reshape(x, (batch, groups, 1, seq, width))
    x = rewriter.expand(x, (batch, groups, heads // groups, seq, width))
    return rewriter.reshape(x, (batch, heads, seq, width))


def emit_dropout(rewriter: Rewriter, x: Value, p: float) -> Value:
    """Emits dropout of x with probability p."""
    return rewriter.emit("autopar.dropout", x, p, like=x)
