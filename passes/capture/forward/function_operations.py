"""A user's torch.autograd.Function as plain operations: with the derivative of its
forward, or with its own backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.overrides import TorchFunctionMode

from ..forward.function_calls import Apply, has_setup
from ..forward.unseen import derivatives_allowed

ONCE = once_differentiable(lambda ctx: None).__code__

# Arithmetic that writes in place -> the same that does not.
ARITHMETIC = "add sub mul div addcmul addcdiv pow neg exp sigmoid tanh masked_fill"
WRITES = {getattr(Tensor, f"{n}_"): getattr(Tensor, n) for n in ARITHMETIC.split()}
WRITES |= {
    getattr(Tensor, f"__i{n}__"): getattr(Tensor, n) for n in ("add", "sub", "mul")
}
WRITES[Tensor.__itruediv__] = Tensor.div


@dataclass(frozen=True)
class Shape:
    """A tensor among the arguments of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool


@dataclass(frozen=True)
class Call:
    """A call of a Function: its class, its arguments (tensors as `Shape`), its line."""

    function: Apply
    args: tuple[Any, ...]
    source: str

    @property
    def kind(self) -> tuple[object, ...]:
        return (self.function, *map(repr, self.args))

    def with_wants_of(self, other: Call | None) -> Call:
        """The call, where what had wanted a gradient in another reading wants it too:
        without rows, y[rows] += f(x) is of nothing that has one."""
        if other is None or other.function is not self.function:
            return self
        pairs = zip(self.args, other.args, strict=False)
        args = [replace(a, wants_gradient=True) if wants(b) else a for a, b in pairs]
        return replace(self, args=tuple(args))


class _Context(FunctionCtx):
    """A Function's context without autograd, which forward leaves to backward."""

    to_save: tuple[Any, ...] = ()

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """Arguments as copies: a backward may write into what forward left there, and
        autograd lets nobody write into what a gradient is asked for."""
        return tuple(x.clone() if _is_asked_for(x) else x for x in self.to_save)


def run_forward(cls: Apply, *args: Any, **kwargs: Any) -> Any:
    """Run a Function's forward as plain operations."""
    ctx, made = _run(cls, *args, **kwargs)
    constant = {id(x) for x in getattr(ctx, "non_differentiable", ())}
    if isinstance(made, tuple):
        return tuple(x.detach() if id(x) in constant else x for x in made)
    return made.detach() if id(made) in constant else made


def _run(cls: Apply, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Runs a Function's forward: (the context for its backward, its result)."""
    ctx: Any = _Context()
    ctx.needs_input_grad = tuple(wants(shape_of(a)) for a in args)
    with _CopiedOut():
        if not has_setup(cls):
            return ctx, cls.forward(ctx, *args, **kwargs)
        made = cls.forward(*args, **kwargs)
        cls.setup_context(ctx, args, made)
    return ctx, made


def with_backward(call: Call, *args: Any) -> tuple[Any, tuple[Any, ...]]:
    """Run a Function's forward as plain operations whose derivative is its backward.

    The backward dx = B dy + c of y = f(x) is differentiated by dy, so that z = B^T x is
    made of plain operations, and the derivative of z by x is B. Returns y, and c.
    """
    wanted = tuple(map(wants, call.args))
    # Some backwards ask which arguments had wanted a gradient.
    inner = tuple(
        a.detach().clone().requires_grad_(want) if isinstance(a, Tensor) else a
        for a, want in zip(args, wanted, strict=True)
    )
    with torch.no_grad():
        ctx, made = _run(call.function, *inner)
    if getattr(ctx, "dirty_tensors", ()):
        raise ValueError("its forward writes in place")
    for a, own, want in zip(args, inner, wanted, strict=True):
        if isinstance(a, Tensor) and own._version:  # of which autograd is not told
            a.copy_(a + (own - a).detach() if want else own)
    ctx.needs_input_grad = wanted
    constant = {id(x) for x in getattr(ctx, "non_differentiable", ())}
    ys = made if isinstance(made, tuple) else (made,)
    flows = [
        isinstance(y, Tensor)
        and (y.is_floating_point() or y.is_complex())
        and id(y) not in constant
        for y in ys
    ]
    # A backward runs outside of autocast, unless it asks for it.
    device = next(a.device.type for a in args if isinstance(a, Tensor))
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        dys = [
            torch.zeros_like(y).requires_grad_(flow) if isinstance(y, Tensor) else None
            for y, flow in zip(ys, flows, strict=True)
        ]
        with _WritesLast():
            dxs = _differentiable_backward(call.function)(ctx, *dys)
        dxs = dxs if isinstance(dxs, tuple) else (dxs,)
        pairs = [
            (dx, x)
            for dx, x, want in zip(dxs, args, wanted, strict=False)
            if want and _depends(dx)
        ]
        ends = [dy for dy, flow in zip(dys, flows, strict=True) if flow]
        terms = [dx for dx, _ in pairs], ends, [x for _, x in pairs]
        zs: tuple[Tensor | None, ...] = (None,) * len(ends)
        if pairs:
            with derivatives_allowed():
                zs = torch.autograd.grad(*terms, create_graph=True, allow_unused=True)
        outs, left = [], iter(zs)
        for y, flow in zip(ys, flows, strict=True):
            z = next(left) if flow else None
            y = y.detach() if isinstance(y, Tensor) else y
            outs.append(y if z is None else y + (z - z.detach()))
    return tuple(outs) if isinstance(made, tuple) else outs[0], dxs


class _CopiedOut(TorchFunctionMode):
    """Copies what is to be written into `out=`, which autograd derives no other way: a
    Function's forward runs without it, as operations in its place do not."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        others = dict(kwargs or {})
        out = others.pop("out", None)
        if not isinstance(out, Tensor):
            return func(*args, **(kwargs or {}))
        return out.copy_(func(*args, **others))


class _WritesLast(TorchFunctionMode):
    """Computes in-place ops, `x.mul_(y)`, out of place, and copies the result to x:
    autograd keeps the former x where a capture does not see it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        new = WRITES.get(func)
        if new is None:
            return func(*args, **kwargs)
        x, *others = args
        former = x.clone()
        others = [former if other is x else other for other in others]
        return x.copy_(new(former, *others, **kwargs))


def _is_asked_for(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_leaf and x.requires_grad


def _depends(dx: Any) -> bool:
    return isinstance(dx, Tensor) and dx.requires_grad


def _differentiable_backward(cls: Apply) -> Callable[..., Any]:
    """The backward of a Function, also where it is marked `once_differentiable`."""
    backward: Any = cls.backward
    once = getattr(backward, "__code__", None) is ONCE
    return backward.__wrapped__ if once else backward


def shape_of(arg: Any) -> Any:
    """The `Shape` of a tensor; any other argument itself."""
    if not isinstance(arg, Tensor):
        return arg
    return Shape(tuple(arg.shape), arg.dtype, arg.requires_grad)


def wants(arg: Any) -> bool:
    """Whether an argument, as `shape_of` gives it, is to have a gradient."""
    return isinstance(arg, Shape) and arg.wants_gradient
