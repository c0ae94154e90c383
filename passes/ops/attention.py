"""Attention as one op: whole, of some of the rows, or with keys that are passed round
(`passes.shard.ring`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..graph import Node, Value
from ..ops import extents
from ..ops.cotangents import Cotangents
from ..ops.notation import Role
from ..ops.op import Alternative, Op, OutCotangents, Place, op_of

RING: Role = "ring"
Q, K, V, MASK = range(4)  # operands
ATTENTION, ATTENTION_BACKWARD = "comm.attention", "comm.attention_backward"


def rule(node: Node) -> str:
    """The rule of attention: query rows are independent, and see all keys, with what is
    known of each; a causal flag counts rows."""
    q, k, mask = node.named("q k mask")
    s = "s~" if node.arg("is_causal") else "s"
    groups = k.shape[1]
    kv = "h" if groups == q.shape[1] else f"g={groups}"
    heads = "h" if groups == q.shape[1] else f"({kv} r)"
    operands = [f"b {heads} {s} e!", f"b {kv} t! e!", f"b {kv} t! v!"]
    if mask is not None:
        operands.append(" ".join(["b", heads, s, "t!"][4 - len(mask.shape) :]))
    operands += ["b t!" for name in ("documents", "shown") if name in node.kwargs]
    return f"{', '.join(operands)} -> b {heads} {s} v!"


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None = None,
    documents: Tensor | None = None,
    shown: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T scale + mask) v -> [b,h,s,v].

    q [b,h,s,e], k [b,g,t,e], v [b,g,t,v], where g divides h. A causal mask is
    aligned at the top left; a row that attends to nothing gives 0. window: of these
    keys a row sees so many, its own being the last. documents [b or 1,s], integers: of
    these, those with the row's own. shown [b or 1,t], bool: those that rows may see.
    """
    copies = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * scale
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        causal = causal if window is None else causal.triu(1 - window)
        scores = scores.masked_fill(~causal, -math.inf)
    if documents is not None:
        mask = (documents[:, :, None] == documents[:, None]).unsqueeze(1)
    if shown is not None:
        columns = shown[:, None, None]
        mask = columns if mask is None else columns & mask
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    # A mask may be wider than what it masks.
    return scores.softmax(-1).masked_fill(nothing, 0).to(v.dtype) @ v


def on_shard(
    start: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    _: bool,
    scale: float,
    window: int | None = None,
    documents: Tensor | None = None,
    shown: Tensor | None = None,
) -> Tensor:
    """Attention of rows that begin at a global one: q [B,H,S,E], k [B,G,T,E] and
    v [B,G,T,V] of all keys -> [B,H,S,V]."""
    rows, columns = torch.arange(q.shape[2]) + start, torch.arange(k.shape[2])
    apart = rows[:, None] - columns
    seen = (apart >= 0) & (apart < (window or len(columns)))
    if documents is not None:
        seen = seen & (documents[:, rows, None] == documents[:, None]).unsqueeze(1)
    if shown is not None:
        seen = seen & shown[:, None, None]
    return formula(q, k, v, seen, False, scale)


def on_rank(at: Place, node: Node, local: Node) -> Node:
    """Attention of some of the rows, under a causal mask, goes by their positions; so
    does attention to a window of the keys, to those of a row's document, or but to
    padding, or to keys that are passed round: see `passes.shard.ring`."""
    rows, keys = at.position(node.arg("q"), 2), at.position(node.arg("k"), 2)
    axes = [axis for _, split in keys for axis in split]
    apart = node.arg("is_causal") and any(split for _, split in rows)
    if not axes and not apart and not node.kwargs:
        return local
    assert len(axes) < 2, f"{node}: keys are passed round on one axis, not on {axes}"
    ring, ranks = (axes[0], at.sizes[axes[0]]) if axes else (None, 1)
    return replace(local, op=ATTENTION, args=(*local.args, rows, keys, ring, ranks))


def on_ring(node: Node, local: Node, axis: str, ranks: int) -> Node:
    """The node that a rank runs where an axis passes keys round."""
    rows, keys = ((node.arg(name).shape[2], (axis,)) for name in ("q", "k"))
    return replace(
        local, op=ATTENTION, args=(*local.args, (rows,), (keys,), axis, ranks)
    )


def forward(cts: Cotangents, node: Node) -> Node:
    """The backward reads the logarithm of each row's sum."""
    q, out = node.operands[0], node.out
    lse = cts.builder.value("lse", q.shape[:-1], torch.float32)
    return replace(node, outs=(out, lse))


def derivative(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """dq, dk, dv by the op's own backward, out of its operands and results."""
    q, k, v, *others = node.named(op_of(node).heeds)
    dq, dk, dv = (cts.fresh(x) for x in (q, k, v))
    args = (dys[0], q, k, v, *node.outs, *others)
    op = f"{node.op}_backward"
    cts.append(Node(op, args, node.kwargs, (dq, dk, dv), node.location))
    return [dq, dk, dv] + [None] * (len(node.operands) - 3)


def has_learned_mask(cts: Cotangents, node: Node) -> bool:
    """Whether gradients flow into the mask."""
    return any(cts.wanted(mask) for mask in node.operands[3:])


def flops(scores: int, values: int) -> Callable[[Node], int]:
    """Counts so many products as large as q k^T, and as large as scores v. The backward
    makes the scores again (Dao 2022, arXiv:2205.14135, appendix B).

    All keys count, or a window of them: a ring has a share of them at a time. Not
    discounted for causality, as in the published formulas, nor for documents, whose
    lengths nobody knows.
    """

    def count(node: Node) -> int:
        q, k, v = node.named("q k v")
        keys = node.arg("keys")
        columns = k.shape[-2] if keys is None else prod(extent for extent, _ in keys)
        columns = min(columns, node.kwargs.get("window", columns))
        rows = q.numel // q.shape[-1]
        return 2 * rows * columns * (scores * q.shape[-1] + values * v.shape[-1])

    return count


# --- Rings, and memory --------------------------------------------------------------


def ring_of(node: Node) -> str | None:
    """The axis that a rank's node passes keys and values round on, if it does."""
    return node.arg("ring") if node.op in (ATTENTION, ATTENTION_BACKWARD) else None


def passed_round(
    node: Node, backward: bool | None = None
) -> list[tuple[torch.dtype, int, int]]:
    """What a ring sends: by dtype the calls and bytes, shares being alike. backward: if
    not as the node, then in which of both.

    Forward: keys and values of every rank but the next go on. Backward: these again,
    and their gradients, in float32 or wider, which all come home.
    """
    k, v, ranks = node.named("k v ranks")
    messages = [(k.dtype, ranks - 1, (ranks - 1) * (k.bytes + v.bytes))]
    if node.op == ATTENTION_BACKWARD if backward is None else backward:
        wide = torch.promote_types(k.dtype, torch.float32)
        size = ranks * wide.itemsize * (k.numel + v.numel)
        messages.append((wide, ranks, size))
    return messages


def workspace(node: Node) -> int:
    """Bytes that attention needs while it runs.

    On a ring: keys and values at work and under way; gradients of them at work, on the
    way to the next rank, and from the one before. Where queries share keys in half
    precision: copies, as some kernels take a head of keys for each of queries, and give
    as many gradients.
    """
    q, k, v = node.named("q k v")
    is_backward = node.op.endswith("_backward")
    shared = q.shape[1] // max(k.shape[1], 1)
    copies = shared > 1 and k.dtype.itemsize == 2
    needed = copies * (k.bytes + v.bytes) * shared * (1 + is_backward)
    if ring_of(node) is not None:
        needed += 2 * (k.bytes + v.bytes)
        if is_backward:
            needed += 3 * max(4, k.dtype.itemsize) * (k.numel + v.numel)
    return needed


GIVEN = "q k v mask is_causal scale"
RESULTS = "q k v out lse mask is_causal scale"
LIES = "rows keys ring ranks"  # where a rank's rows and keys do, and who meets

OPS = (
    Op(
        "aten.scaled_dot_product_attention",
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        extents=extents.attention,
        finite="always",
        autocast="low",
        lowered=3,  # a mask need not be
    ),
    Op(
        "autopar.attention",
        GIVEN,
        rule,
        (  # The value's width differs from the key's, so no letters are confused.
            "(x(a, 3, b, 3), x(a, 3, c, 3), x(a, 3, c, 5), None, False, 0.6); "
            "(x(a, 2, b, 3), x(a, 2, b, 3), x(a, 2, b, 5), None, True, 0.6); "
            "(x(a, 6, b, 3), x(a, 2, c, 3), x(a, 2, c, 5), None, False, 0.6); "
            "(x(2, 4, b, 3), x(2, 1, b, 3), x(2, 1, b, 5), None, True, 0.6); "
            "(x(a, 2, b, 3), x(a, 2, c, 3), x(a, 2, c, 5), bools(b, c), False, 0.6); "
            "(x(a, 6, b, 3), x(a, 2, c, 3), x(a, 2, c, 5), x(a, 6, b, c), False, 0.6); "
            "(x(a, 6, b, 3), x(a, 2, c, 3), x(a, 2, c, 5), bools(a, 1, b, c), "
            "False, 0.6); "
            "(x(a, 2, b, 3), x(a, 2, b, 3), x(a, 2, b, 5), None, True, 0.6, "
            "documents=ints(a, b)); "
            "(x(a, 2, b, 3), x(a, 2, b, 3), x(a, 2, b, 5), None, True, 0.6, "
            "documents=ints(a, b), shown=bools(a, b))"
        ),
        alternatives=(
            Alternative(
                RING, (Q, 2), ((K, 2), (V, 2)), constant=(MASK,), on_rank=on_ring
            ),
        ),
        is_product=True,
        flops=flops(1, 1),
        workspace=workspace,
        keeps=(0, 1, 2, "result"),
        on_rank=on_rank,
        derivative=derivative,
        traced_if=has_learned_mask,
        forward=forward,
        formula=formula,
        on_shard=on_shard,
    ),
    Op(
        ATTENTION,
        f"{GIVEN} {LIES}",
        flops=flops(1, 1),
        workspace=workspace,
        derivative=derivative,
        traced_if=has_learned_mask,
        forward=forward,
        called_with=9,
    ),
    Op("comm.causal_mask", "rows columns"),
    Op(
        "autopar.attention_backward",
        f"dy {RESULTS}",
        flops=flops(3, 2),
        workspace=workspace,
    ),
    Op(
        ATTENTION_BACKWARD,
        f"dy {RESULTS} {LIES}",
        flops=flops(3, 2),
        workspace=workspace,
        called_with=12,
    ),
)
