"""The reference for every claim: the untouched model on one device, full batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autopar.capture.left_as_found import buffers_kept
from autopar.passes.capture.forward.call_model import loss_of
from autopar.passes.capture.mixed_precision import Lowering, autocast, parameters_in
from autopar.passes.graph import resolve
from autopar.passes.ops.random import draw_of, overload
from autopar.passes.replaced import replaced
from autopar.runtime.comm.routing_replay import Choosing
from autopar.runtime.execute.loss_scale import LossScale
from autopar.runtime.kernels import draw, dropout_mask

# Functions within which torch draws random numbers.
DRAWING = frozenset(
    {
        *(torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.normal),
        *(torch.randint, torch.randint_like, torch.bernoulli, F.gumbel_softmax),
        *(Tensor.uniform_, Tensor.normal_, Tensor.exponential_),
        *(Tensor.bernoulli, Tensor.bernoulli_),
    }
)


class OurChance(TorchFunctionMode):
    """Gives a model the random numbers, and its dropouts the masks, that a compiled
    program draws.

    Each is a function of seed, step, number of the call and global position, so that
    it does not depend on the plan; torch's own generator cannot give that.
    key: of seed and step; None: there is no dropout, and torch draws.
    """

    def __init__(self, key: int | None) -> None:
        super().__init__()
        self.key, self.calls = key, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self.dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self.attention(func, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.inside(func, *args, **kwargs)
        with _Draws(self) if func in DRAWING else nullcontext():
            return func(*args, **kwargs)

    def inside(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of torch; modes do not see what it calls in turn."""
        attention = partial(self.attention, F.scaled_dot_product_attention)
        ours = replaced(F, "scaled_dot_product_attention", attention)
        with ours, replaced(F, "dropout", self.dropout):
            return func(*args, **kwargs)

    def dropout(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0.0 or self.key is None:
            return input
        shape = [[(n, ((0, n),))] for n in input.shape]
        keep = dropout_mask(p, self.key, self.calls, shape, input.device)
        self.calls += 1
        return input * keep * (1.0 / (1.0 - p) if p < 1.0 else 0.0)

    @torch.no_grad()
    def draw(self, op: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        """The numbers that one of torch's ops draws; None if it is no draw we know."""
        name = "aten." + op.overloadpacket.__name__.removesuffix("_")
        names = [a.name for a in op._schema.arguments]
        defaults = {a.name: a.default_value for a in op._schema.arguments}
        bound = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        drawn = draw_of(name, bound)
        if drawn is None or self.key is None:
            return None
        held = [x for x in bound.values() if isinstance(x, Tensor)]
        device = held[0].device if held else bound["device"] or "cpu"
        like = args[0] if op._schema.is_mutable else _like(op, args, kwargs)
        whole = [[(n, ((0, n),))] for n in like.shape]
        dtype = drawn.dtype or like.dtype
        x = draw(drawn.kind, self.key, self.calls, whole, device, dtype)
        self.calls += 1
        for step, operand in drawn.steps:
            x = resolve(overload(step, operand))(x, operand)
        # What was written in place is written again.
        return like.copy_(x) if op._schema.is_mutable else x.to(like.dtype)

    def attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0.0:
            return func(
                query, key, value, attn_mask, 0.0, is_causal,
                scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
        if enable_gqa:
            repeats = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)
        if scale is None:
            scale = query.shape[-1] ** -0.5
        scores = query @ key.transpose(-2, -1) * scale
        if is_causal:
            attn_mask = torch.ones(
                scores.shape[-2:], dtype=torch.bool, device=scores.device
            ).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask.to(scores.dtype)
        # As torch does: a row that attends to nothing gives 0.
        nothing = (scores == float("-inf")).all(-1, keepdim=True)
        weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
        return self.dropout(weights, dropout_p) @ value


def _like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """An op's result without values, leaving torch's generator as it is."""
    args, kwargs = tree_map(
        lambda x: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x,
        (args, kwargs),
    )
    if "device" in {a.name for a in op._schema.arguments}:
        kwargs["device"] = "meta"
    like: Tensor = op(*args, **kwargs)
    return like


class _Draws(TorchDispatchMode):
    """Draws our numbers, whatever function of torch is called for them."""

    def __init__(self, chance: OurChance) -> None:
        super().__init__()
        self.chance = chance

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        drawn = self.chance.draw(func, *args, **kwargs)
        return func(*args, **kwargs) if drawn is None else drawn


def reference_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    key: int | None = 0,
    precision: Lowering = None,
    choosing: Choosing | None = None,
    written: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and every gradient of `model(**batch)`, by the model's own names.

    key: of random numbers and masks of dropout; None: there is no dropout, and torch
    draws. precision: what the model runs in. float16 comes with a loss
    scale: the greatest power of two, up to that of `LossScale`, without an overflow.
    choosing: notes what routers choose, or tells them. written: is given what buffers
    have then that forward writes to.

    `.grad` of the model is left as it was, and its buffers are.
    """
    device = next(p.device.type for p in model.parameters())
    own = parameters_in(model, precision)
    with (
        buffers_kept(model, written),
        own,
        OurChance(key),
        choosing or nullcontext(),
        torch.enable_grad(),
    ):
        with autocast(precision, device):
            loss = loss_of(model, batch, loss_fn)
        wanted = {n: p for n, p in model.named_parameters() if p.requires_grad}
        grads = _gradients(loss, list(wanted.values()), precision)
    gradients = {
        n: torch.zeros_like(p) if g is None else g.to(p.dtype)
        for (n, p), g in zip(wanted.items(), grads, strict=True)
    }
    return loss.detach(), gradients


def _gradients(
    loss: Tensor, wanted: list[Tensor], precision: Lowering
) -> tuple[Tensor | None, ...]:
    scale = LossScale().scale if precision is torch.float16 else 1.0
    while True:
        gradients = torch.autograd.grad(
            loss * scale, wanted, allow_unused=True, retain_graph=scale > 1.0
        )
        held = [g for g in gradients if g is not None]
        if scale <= 1.0 or all(bool(g.isfinite().all()) for g in held):
            return tuple(None if g is None else g / scale for g in gradients)
        scale /= 2.0
