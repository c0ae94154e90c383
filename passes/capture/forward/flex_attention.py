"""torch's flex_attention, read as the attention that it is.

Its mask is a function of places, `mask_mod(b, h, q, kv)`: called with all places at
once it is a mask as any other, and what `passes.capture.normalize.causal_masks` and
`column_masks` know of it shows. Torch itself computes no gradients of flex_attention
on CPUs, nor does it export them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch import Tensor

from ...errors import CaptureError

OUTSIDE = (
    "make it within forward, by create_block_mask(mask_mod, ...), of tensors that are "
    "there; what it shows is said by mask_mod alone"
)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """query [b, h, s, e], key [b, g, t, e], value [b, g, t, v] -> [b, h, s, v]; with
    the logarithm of each row's sum, if that is asked for. The arguments are torch's.

    Raises: CaptureError for a mask that was not made by `create_block_mask` in forward.
    """
    mask = None if block_mask is None else _shown(block_mask, query, key)
    if score_mod is None and not return_lse and return_aux is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.mT * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if score_mod is not None:
        scores = score_mod(scores, *_places(query.shape[:2], query, key))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    nothing = scores.amax(-1, keepdim=True) == -math.inf
    weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    attended = weights.to(value.dtype) @ value
    if return_lse:
        return attended, scores.logsumexp(-1)
    if return_aux is None:
        return attended
    wanted = {"lse": torch.logsumexp, "max_scores": torch.amax}
    asked = {n: f(scores, -1) for n, f in wanted.items() if getattr(return_aux, n)}
    return attended, flex.AuxOutput(**asked)


OURS = "_autopar"  # in torch's module
PLACES = "_autopar_places"  # samples, heads, rows, columns of a mask that is ours


def block_mask(
    mask_mod: Callable[..., Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: Any = 128,
    *_: Any,
    **__: Any,
) -> Any:
    """A BlockMask of this function alone: which blocks it shows nobody reads."""
    counts = torch.ones(1, 1, 1, dtype=torch.int32)
    blocks = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    made = flex.BlockMask.from_kv_blocks(
        counts, blocks, BLOCK_SIZE=BLOCK_SIZE, mask_mod=mask_mod,
        seq_lengths=(Q_LEN, KV_LEN),
    )  # fmt: skip
    vars(made)[PLACES] = (B or 1, H or 1, Q_LEN, KV_LEN)
    return made


def _shown(block_mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """What a block mask shows [b or 1, h or 1, s, t], or less where it is the same."""
    places = vars(block_mask).get(PLACES)
    lengths = query.shape[-2], key.shape[-2]
    if places is None:
        raise CaptureError(
            "the BlockMask that flex_attention is given was made outside of forward, "
            "of a batch that ranks do not have, or block by block",
            fix=OUTSIDE,
        )
    if places[2:] != lengths:
        raise CaptureError(
            f"flex_attention is of {lengths[0]} rows and {lengths[1]} columns, but its "
            f"BlockMask of {places[2]} and {places[3]}",
            fix="give create_block_mask the lengths of query and key",
        )
    shown = block_mask.mask_mod(*_places(places[:2], query, key))
    return shown.expand(torch.broadcast_shapes(shown.shape, lengths))


def _places(sizes: Any, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """All numbers of samples, heads, rows and columns, each along a dim of its own."""
    extents = (*sizes, query.shape[-2], key.shape[-2])
    return tuple(
        torch.arange(n, device=query.device).view(-1, *(1,) * (3 - dim))
        for dim, n in enumerate(extents)
    )


# --- in place of torch's ---------------------------------------------------------


@contextmanager
def flex_as_attention() -> Iterator[None]:
    """Runs `attend` for torch's flex_attention, and `block_mask` for its masks.

    Models have torch's functions under names of their own, compiled ones too, so it is
    the code of these that is replaced.
    """
    names = vars(flex)
    if OURS in names:
        yield
        return
    calls = {names["flex_attention"]: _attend, names["create_block_mask"]: _mask}
    held = [(f, f.__code__, f.__defaults__, f.__kwdefaults__) for f in calls]
    names[OURS] = {"flex_attention": attend, "create_block_mask": block_mask}
    for function, call in calls.items():
        _set(function, call.__code__, None, None)
    try:
        yield
    finally:
        for one in held:
            _set(*one)
        del names[OURS]


def _set(function: Any, code: CodeType, defaults: Any, keywords: Any) -> None:
    function.__code__ = code
    function.__defaults__, function.__kwdefaults__ = defaults, keywords


def _attend(*args: Any, **kwargs: Any) -> Any:
    return globals()["_autopar"]["flex_attention"](*args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    return globals()["_autopar"]["create_block_mask"](*args, **kwargs)
