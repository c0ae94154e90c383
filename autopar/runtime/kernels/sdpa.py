"""Scaled dot product attention, forward and backward, without autograd.

One pair of functions over the fused kernels of each device; a plain formula serves
where no fused kernel does. Which one runs follows from shapes, dtypes and device alone.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention as `F.scaled_dot_product_attention` computes it, and its lse.

    q [B,H,S,E], k [B,G,T,E], v [B,G,T,V] where G divides H: head h reads group
    h // (H / G). mask broadcasts to [B,H,S,T]; bool (True attends) or added to the
    scores (on CUDA rounded to q's dtype first). is_causal aligns at the top left.
    scale defaults to 1/sqrt(E).

    Returns out [B,H,S,V] and lse, the logsumexp of each row's scores in float32 or
    wider, [B,H,S]. Only `attention_backward` may read lse: kernels disagree on a row
    that attends to nothing (whose out is 0 on CPU), and one of CUDA's pads S.
    Raises: ValueError when the shapes disagree, or mask comes with is_causal.
    """
    kernel, call = _prepare(_Call(q, k, v, mask, is_causal, scale))
    qkv = (call.q, call.k, call.v)
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(
            *qkv, 0.0, is_causal, attn_mask=call.mask, scale=scale
        )
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(
            *qkv, 0.0, is_causal, scale=scale
        )[:2]
    if kernel == "efficient":
        return aten._scaled_dot_product_efficient_attention(
            *qkv, call.mask, True, 0.0, is_causal, scale=scale
        )[:2]
    return _explicit(call)


def attention_over_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` over some of the keys, and the true logsumexp of the scores, [B,H,S]:
    -inf where a mask hides all of these keys. Parts join by it: see
    `autopar.runtime.comm.ring_attention`."""
    out, lse = attention(q, k, v, mask, is_causal, scale)
    lse = lse[..., : q.shape[2]]
    if mask is not None:
        hides = mask if mask.dtype == torch.bool else mask > -math.inf
        hides = ~hides[(None,) * (4 - mask.ndim)].any(-1)
        lse = lse.masked_fill(hides, -math.inf)
        out = out.masked_fill(hides.unsqueeze(-1), 0)
    return out, lse


def attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    partial: bool = False,
) -> Gradients:
    """Gradients of `attention`: dq, dk and dv, shaped as q, k and v; none for the mask.

    dy [B,H,S,V] is the gradient of out; the rest was given to or returned by it. Or,
    if `partial`, k and v are a part of the keys, out and lse are those of all keys (see
    `attention_over_part`), and dq is this part's share of the sum.
    """
    kernel, call = _prepare(_Call(q, k, v, mask, is_causal, scale))
    if partial and kernel == "explicit":
        dq, dk, dv = _explicit_backward(call, dy, out, lse, partial)
    else:
        if partial:  # the efficient kernel reads 32 rows at a time
            rows = -lse.shape[2] % 32 if kernel == "efficient" else 0
            lse = torch.nn.functional.pad(lse, (0, rows), value=math.inf).contiguous()
        dq, dk, dv = _BACKWARD[kernel](call, _dense(dy), out, lse)
    return dq, _sum_groups(dk, k.shape[1]), _sum_groups(dv, k.shape[1])


def in_window(rows: Tensor, keys: Tensor, window: int) -> Tensor:
    """Whether the rows at some positions [S] see keys at others [T], of the last
    `window` up to their own: bool [S,T]."""
    apart = rows[:, None] - keys
    return (apart >= 0).logical_and_(apart < window)


@dataclass(frozen=True)
class _Call:
    """One attention; what `_prepare` returns has a head of k and v per head of q,
    unless its kernel takes groups."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None


def _prepare(call: _Call) -> tuple[str, _Call]:
    """Check the operands, choose their kernel and lay them out as it takes them."""
    q, k, v, mask = call.q, call.k, call.v, call.mask
    # The fused CPU kernel reads out of bounds where these do not hold.
    agree = (
        q.ndim == k.ndim == v.ndim == 4
        and q.shape[0] == k.shape[0] == v.shape[0]
        and q.shape[3] == k.shape[3]
        and k.shape[1:3] == v.shape[1:3]
        and q.shape[1] % max(k.shape[1], 1) == 0
    )
    if not agree:
        raise ValueError(
            "attention needs q [B,H,S,E], k [B,G,T,E], v [B,G,T,V] where G divides H: "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if mask is not None and call.is_causal:
        raise ValueError("attention takes a mask or is_causal, not both")
    kernel = _kernel(q, k, v, mask is not None, call.is_causal)
    if mask is not None:
        mask = _additive(mask, q)
        mask = _aligned(mask, q, k) if kernel == "efficient" else mask
    if not _takes_groups(kernel, q.dtype):
        k, v = (_spread_groups(x, q.shape[1]) for x in (k, v))
    return kernel, replace(call, q=_dense(q), k=_dense(k), v=_dense(v), mask=mask)


def _kernel(q: Tensor, k: Tensor, v: Tensor, masked: bool, is_causal: bool) -> str:
    """Name the kernel that takes these operands.

    Reads only shapes, dtypes and device, so that forward and backward agree.
    """
    head_dim, value_dim = q.shape[3], v.shape[3]
    if 0 in (q.numel(), k.numel(), v.numel()):  # the CPU kernel divides by zero
        return "explicit"
    if q.is_cpu:
        return "cpu" if head_dim == value_dim else "explicit"
    if not q.is_cuda or q.dtype == torch.float64:
        return "explicit"
    ampere = torch.cuda.get_device_capability(q.device) >= (8, 0)
    half = q.dtype in (torch.float16, torch.bfloat16)
    square = q.shape[2] == k.shape[2]  # flash aligns is_causal at the bottom right
    width = head_dim == value_dim and head_dim % 8 == 0 and head_dim <= 192
    if half and ampere and width and not masked and (square or not is_causal):
        return "flash"
    # The efficient kernel loads rows of q, k and v 16 bytes at a time.
    aligned = all(dim * q.element_size() % 16 == 0 for dim in (head_dim, value_dim))
    if aligned and (ampere or q.dtype != torch.bfloat16):
        return "efficient"
    return "explicit"


def _takes_groups(kernel: str, dtype: torch.dtype) -> bool:
    """Whether a kernel reads a head of keys for several of queries.

    That of the CPU adds up their gradients in the dtype of the keys, which in half
    precision doubles the rounding error of 8 heads.
    """
    return kernel == "flash" or (kernel == "cpu" and dtype.itemsize > 2)


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    """The mask as a 4-D tensor to add to the scores: the fused ops take no bool."""
    mask = mask[(None,) * (4 - mask.ndim)]
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        return zeros.masked_fill_(~mask, float("-inf"))
    # A float32 mask stays so on CPU: its lowest value would be -inf in float16.
    keeps = q.is_cpu and mask.dtype == torch.float32
    return _dense(mask if keeps else mask.to(q.dtype))


def _aligned(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mask as [B,H,S,T] whose rows lie 16 elements aligned in memory."""
    cols = k.shape[2]
    if mask.shape[3] != cols or any(stride % 16 for stride in mask.stride()[:3]):
        mask = mask.expand(-1, -1, -1, cols)
        mask = torch.nn.functional.pad(mask, (0, -cols % 16)).contiguous()[..., :cols]
    return mask.expand(*q.shape[:3], cols)


def _dense(x: Tensor) -> Tensor:
    """x with its last dim contiguous, as the kernels assume; other strides are free."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _spread_groups(x: Tensor, heads: int) -> Tensor:
    if x.shape[1] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_groups(dx: Tensor, groups: int) -> Tensor:
    """The transpose of `_spread_groups`."""
    if dx.shape[1] == groups:
        return dx
    return dx.unflatten(1, (groups, dx.shape[1] // groups)).sum(2)


def _cpu_backward(call: _Call, dy: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(dy, call.q, call.k, call.v, out, lse, 0.0, call.is_causal),
        attn_mask=call.mask,
        scale=call.scale,
    )


def _flash_backward(call: _Call, dy: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    # Without dropout the random state is never read; a dense batch has no lengths.
    state = torch.empty(2, dtype=torch.uint64, device=dy.device)
    lengths = (None, None, call.q.shape[2], call.k.shape[2])
    return aten._scaled_dot_product_flash_attention_backward(
        *(dy, call.q, call.k, call.v, out, lse, *lengths),
        *(0.0, call.is_causal, state, state[0]),
        scale=call.scale,
    )


def _efficient_backward(call: _Call, dy: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    state = torch.empty((), dtype=torch.int64, device=dy.device)  # unread, as above
    return aten._scaled_dot_product_efficient_attention_backward(
        *(dy, call.q, call.k, call.v, call.mask, out, lse, state, state),
        *(0.0, [True, True, True, False], call.is_causal),
        scale=call.scale,
    )[:3]


def _scores(call: _Call, dtype: torch.dtype) -> Tensor:
    scale = call.q.shape[3] ** -0.5 if call.scale is None else call.scale
    scores = (call.q.to(dtype) * scale) @ call.k.to(dtype).mT
    if call.is_causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(hidden.triu_(1), float("-inf"))
    return scores if call.mask is None else scores.add_(call.mask)


def _explicit(call: _Call) -> tuple[Tensor, Tensor]:
    """Attention as its formula, in float32 or wider, for what no fused op takes."""
    scores = _scores(call, torch.promote_types(call.q.dtype, torch.float32))
    out = aten._safe_softmax(scores, -1) @ call.v.to(scores.dtype)
    return out.to(call.q.dtype), scores.logsumexp(-1)


def _explicit_backward(
    call: _Call, dy: Tensor, out: Tensor, lse: Tensor, partial: bool = False
) -> Gradients:
    """dS = P * (dP - rowsum(dO * O)): Dao et al., arXiv 2205.14135, appendix B."""
    q, k, v, dy, out = (x.to(lse.dtype) for x in (call.q, call.k, call.v, dy, out))
    scores = _scores(call, lse.dtype)
    if partial:
        weights = scores.sub_(lse[..., None]).exp_()
    else:
        # Not exp(scores - lse): where a mask adds -3e38, lse has no digits left.
        weights = aten._safe_softmax(scores, -1)
    dscores = (dy @ v.mT).sub_((dy * out).sum(-1, keepdim=True)).mul_(weights)
    dscores.mul_(q.shape[3] ** -0.5 if call.scale is None else call.scale)
    grads = (dscores @ k, dscores.mT @ q, weights.mT @ dy)
    return tuple(grad.to(call.q.dtype) for grad in grads)


_BACKWARD = {
    "cpu": _cpu_backward,
    "flash": _flash_backward,
    "efficient": _efficient_backward,
    "explicit": _explicit_backward,
}
