"""What a node computes, on plain tensors in one process.

Ops of our own have kernels elsewhere; these formulas say what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.graph import Node, resolve

Results = tuple[Tensor | None, ...]


def evaluate(
    node: Node, operands: Sequence[Tensor], start: int | None = None
) -> Results:
    """The results of a node on the given operands, one a tensor argument.

    start: for an op that must know it, at which global index its shard begins: of a
    table that is looked up in, or of the rows of causal attention.
    """
    given = iter(operands)
    node = node.substitute(lambda _: next(given))
    if start is not None:
        found = SHARDS[node.op](start, *node.args)
    else:
        found = (REFERENCE.get(node.op) or resolve(node.op))(*node.args, **node.kwargs)
    if isinstance(found, Tensor):
        return (found,)
    return tuple(x if isinstance(x, Tensor) else None for x in found)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """softmax(q k^T scale + mask) v -> [b,h,s,v].

    q [b,h,s,e], k [b,g,t,e], v [b,g,t,v], where g divides h. A causal mask is
    aligned at the top left; a row that attends to nothing gives 0. window: of these
    keys a row sees so many, its own being the last.
    """
    copies = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * scale
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        causal = causal if window is None else causal.triu(1 - window)
        scores = scores.masked_fill(~causal, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    # A mask may be wider than what it masks.
    return scores.softmax(-1).masked_fill(nothing, 0).to(v.dtype) @ v


def sum_exp(x: Tensor, largest: Tensor) -> Tensor:
    """x [..., v], largest [...] -> [...]."""
    return (x - largest[..., None]).exp().sum(-1)


def pick(x: Tensor, index: Tensor, ignored: int | None = None) -> Tensor:
    """x[..., index]: x [..., v], index [...] -> [...]; 0 where the index is outside.

    ignored: the one index outside that is no error.
    """
    return _pick_from(0, x, index)


def expert_linear(x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
    """Each row times the weight of its expert: x [s,k], expert [s], weight [e,n,k] ->
    [s,n]."""
    return _expert_linear_from(0, x, expert, weight)


def _expert_linear_from(
    start: int, x: Tensor, expert: Tensor, weight: Tensor
) -> Tensor:
    local, inside = _local(expert, start, weight.shape[0])
    return (weight[local] @ x[..., None])[..., 0].where(inside[:, None], 0)


def _attention_from(
    start: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    _: bool,
    scale: float,
    window: int | None = None,
) -> Tensor:
    rows, columns = torch.arange(q.shape[2]) + start, torch.arange(k.shape[2])
    apart = rows[:, None] - columns
    seen = (apart >= 0) & (apart < (window or len(columns)))
    return attention(q, k, v, seen, False, scale)


def _pick_from(start: int, x: Tensor, index: Tensor, *_: Any) -> Tensor:
    local, inside = _local(index, start, x.shape[-1])
    return x.gather(-1, local[..., None])[..., 0].where(inside, 0)


def _embedding_from(start: int, table: Tensor, index: Tensor, *_: Any) -> Tensor:
    local, inside = _local(index, start, table.shape[0])
    return table[local].where(inside[..., None], 0)


def _local(index: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    local = index - start
    inside = (local >= 0) & (local < rows)
    return local.where(inside, 0), inside


def choose(x: Tensor, k: int, *_: Any) -> Tensor:
    """The places of the k largest scores: x [..., n] -> int64 [..., k]."""
    return x.topk(k).indices


REFERENCE: dict[str, Callable[..., Tensor]] = {
    "autopar.attention": attention,
    "autopar.sum_exp": sum_exp,
    "autopar.pick": pick,
    "autopar.expert_linear": expert_linear,
    "autopar.choose": choose,
}
SHARDS: dict[str, Callable[..., Tensor]] = {
    "aten.embedding.default": _embedding_from,
    "autopar.pick": _pick_from,
    "autopar.expert_linear": _expert_linear_from,
    "autopar.attention": _attention_from,
}
