"""A user's torch.autograd.Function: its forward is read, and its own backward kept.

A program's derivatives are those of the operations that forward is made of. Where the
backward is another (a straight-through estimator, a reversed or scaled gradient), which
is found out by trying both on drawn numbers, forward is spelled so that it has that
backward: y.detach() + (z - z.detach()), where z is B^T x, for a backward dx = B dy. One
that is not linear in dy is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.func import functionalize
from torch.overrides import TorchFunctionMode

from ..capture.function_calls import Apply, has_setup, through_checkpoints
from ..capture.unseen import derivatives_allowed
from ..capture.user_frames import at_work
from ..errors import CaptureError

ONCE = once_differentiable(lambda ctx: None).__code__
# Elements of all arguments together: more are not tried.
MOST = 1 << 25
SHORT = 24  # extents that dims are shortened to, counted down from here
CLOSE = 1e-4  # the relative error of a derivative, in float64; some round on the way
# Of operands and cotangents that are tried: what clips them does so somewhere.
SPREADS, SCALES = (1.0, 100.0), (1.0, 1e-9, 1e9)

Place = tuple[int, ...]  # of a call: which one it is, and within which
SAME_GRADIENT = (
    "write forward by tensor operations whose derivative is the one you want: "
    "x + (f(x) - x).detach() is f(x) with the gradient of x, "
    "s * x + ((1 - s) * x).detach() is x with s times its gradient"
)


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


class _Context(FunctionCtx):
    """What forward leaves to backward, without autograd."""

    to_save: tuple[Any, ...] = ()

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save


class Functions:
    """The Functions that a model's forward calls, by the place of each call.

    own: the calls whose backward is to be kept.
    """

    def __init__(self) -> None:
        self.calls: dict[Place, Call] = {}
        self.own: set[Place] = set()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a forward: a Function's runs as if its operations stood in its place,
        and is noted."""
        count = [0]  # of calls before; of those within a call; within that ...

        def apply(cls: Apply, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            call, place = Call(cls, tuple(map(_shape, args)), at_work()), tuple(count)
            count[-1] += 1
            count.append(0)
            try:
                if torch.is_grad_enabled() and any(_wants(a) for a in call.args):
                    self.calls[place] = call
                    if place in self.own:
                        return _with_backward(cls, *args)
                return _forward(cls, *args, **kwargs)
            finally:
                count.pop()

        with through_checkpoints(apply):
            yield

    def are_known(self) -> bool:
        """Whether forward was read with all backwards that are to be kept.

        Raises CaptureError for a Function that could not be tried, or whose backward is
        neither its forward's derivative nor linear in what it is given.
        """
        kinds = {call.kind: call for call in self.calls.values()}
        others = {kind for kind, call in kinds.items() if _has_another(call)}
        places = {place for place, call in self.calls.items() if call.kind in others}
        known = places <= self.own
        self.own |= places
        return known


def _forward(cls: Apply, *args: Any, **kwargs: Any) -> Any:
    """Run a Function's forward as plain operations."""
    ctx, made = _run(cls, *args, **kwargs)
    constant = {id(x) for x in getattr(ctx, "non_differentiable", ())}
    if isinstance(made, tuple):
        return tuple(x.detach() if id(x) in constant else x for x in made)
    return made.detach() if id(made) in constant else made


def _run(cls: Apply, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What forward leaves to backward, and what it returns."""
    ctx: Any = _Context()
    ctx.needs_input_grad = tuple(_wants(_shape(a)) for a in args)
    if not has_setup(cls):
        return ctx, cls.forward(ctx, *args, **kwargs)
    made = cls.forward(*args, **kwargs)
    cls.setup_context(ctx, args, made)
    return ctx, made


def _with_backward(cls: Apply, *args: Any) -> Any:
    """Run a Function's forward as plain operations whose derivative is its backward.

    The backward dx = B dy of y = f(x) is differentiated by dy, so that z = B^T x is
    made of plain operations, and the derivative of z by x is B.
    """
    inner = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    ctx, made = _run(cls, *inner)
    if getattr(ctx, "dirty_tensors", ()):
        raise ValueError("its forward writes in place")
    ctx.needs_input_grad = tuple(_wants(_shape(a)) for a in args)
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
        dxs = _differentiable_backward(cls)(ctx, *dys)
        dxs = dxs if isinstance(dxs, tuple) else (dxs,)
        pairs = [
            (dx, x)
            for dx, x in zip(dxs, args, strict=False)
            if isinstance(x, Tensor) and x.requires_grad and _depends(dx)
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
    return tuple(outs) if isinstance(made, tuple) else outs[0]


def _depends(dx: Any) -> bool:
    return isinstance(dx, Tensor) and dx.requires_grad


def _differentiable_backward(cls: Apply) -> Callable[..., Any]:
    """Its backward, also where it says that it is differentiable but once."""
    backward: Any = cls.backward
    once = getattr(backward, "__code__", None) is ONCE
    return backward.__wrapped__ if once else backward


def _shape(arg: Any) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    return Shape(tuple(arg.shape), arg.dtype, arg.requires_grad)


def _wants(arg: Any) -> bool:
    return isinstance(arg, Shape) and arg.wants_gradient


# --- whether a backward is the derivative ------------------------------------------


def _has_another(call: Call) -> bool:
    name, error = f"the backward of '{call.function.__qualname__}'", None
    for short in (True, False):
        try:
            if _derives_forward(call, short):
                return False
        except Exception as problem:  # whatever a user's code raises
            error = problem
            continue
        try:
            if _is_derivative(call, partial(_with_backward, call.function), short):
                return True
        except Exception as problem:
            error = problem
        reason = f" ({type(error).__name__}: {error})" if error else ""
        raise CaptureError(
            f"{name} is neither the derivative of its forward nor linear in the "
            f"gradient that it is given{reason}",
            source=call.source,
            fix=SAME_GRADIENT,
        ) from error
    raise CaptureError(
        f"whether {name} is the derivative of its forward could not be tried on drawn "
        f"numbers: {type(error).__name__}: {error}",
        source=call.source,
        fix=SAME_GRADIENT,
    ) from error


def _derives_forward(call: Call, short: bool) -> bool:
    """Whether the backward is the derivative of forward's operations."""
    try:
        return _is_derivative(call, partial(_forward, call.function), short)
    except RuntimeError:  # as of values that were written over
        return _is_derivative(call, _without_writes(call.function), short)


def _without_writes(cls: Apply) -> Callable[..., Any]:
    """A Function's forward as operations that autograd derives: a scan that writes over
    what it has read is one of new tensors, as it is in a program."""

    def run(*args: Any) -> Any:
        places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]

        def on_tensors(*tensors: Tensor) -> Any:
            filled = dict(zip(places, tensors, strict=True))
            return _forward(cls, *(filled.get(i, a) for i, a in enumerate(args)))

        with _Copied():
            return functionalize(on_tensors)(*(args[i] for i in places))

    return run


class _Copied(TorchFunctionMode):
    """Writes what is copied as 0 and that added: autograd derives no other copy into
    what `functionalize` gives."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__setitem__ and _is_view(args[1]):
            _overwrite(args[0][args[1]], args[2])
            return None
        if func is Tensor.copy_:
            return _overwrite(*args[:2])
        return func(*args, **(kwargs or {}))


def _is_view(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    kinds = (int, slice, EllipsisType, type(None))
    return all(isinstance(p, kinds) and not isinstance(p, bool) for p in parts)


def _overwrite(x: Tensor, value: Any) -> Tensor:
    value = value.clone() if isinstance(value, Tensor) else value  # it may be of x
    return x.fill_(0).add_(value)


def _is_derivative(call: Call, run: Callable[..., Any], short: bool) -> bool:
    """Compare the backward with what autograd makes of `run`, on drawn numbers in
    float64; short: with shortened dims.

    Of all signs first; between 0 and 1 where that is no number, as of a logarithm. Then
    of larger ones, where it is a number of these.
    """
    for spread in SPREADS:
        for draw in (torch.randn, torch.rand):
            args = _draw(call.args, short, draw, spread)
            wanted, gradients = _both_gradients(call, run, args)
            if all(bool(x.isfinite().all()) for x in wanted):
                break
        else:
            if spread == SPREADS[0]:
                raise ValueError("its gradient is infinite or not a number")
            continue
        for a, b in zip(wanted, gradients, strict=True):
            if not bool((a - b).norm() <= CLOSE * max(1e-6, float(a.norm()))):
                return False
    return True


def _both_gradients(
    call: Call, run: Callable[..., Any], args: list[Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """By the Function's backward, and by the operations of `run`."""
    xs = [x for x, a in zip(args, call.args, strict=True) if _wants(a)]

    def copies() -> list[Any]:  # copies, as some write into what they are given
        return [a.clone() if isinstance(a, Tensor) else a for a in args]

    both: tuple[list[Tensor], list[Tensor]] = ([], [])
    for scale in SCALES:
        for apply, gradients in zip((call.function.apply, run), both, strict=True):
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                gradients += _gradients(apply(*copies()), xs, scale)
    return both


def _gradients(made: Any, xs: list[Tensor], scale: float) -> list[Tensor]:
    """Returns gradients by xs of what a Function made, for drawn cotangents."""
    drawn = torch.Generator().manual_seed(1)
    many = made if isinstance(made, tuple) else (made,)
    ys = [y for y in many if isinstance(y, Tensor)]
    dys = [scale * torch.randn(y.shape, generator=drawn).to(y.dtype) for y in ys]
    ends = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
    if not ends:
        return [torch.zeros_like(x) for x in xs]
    dxs = torch.autograd.grad(
        [y for y, _ in ends], xs, [dy for _, dy in ends], allow_unused=True
    )
    return [
        torch.zeros_like(x) if dx is None else dx / scale
        for x, dx in zip(xs, dxs, strict=True)
    ]


def _draw(args: tuple[Any, ...], short: bool, draw: Any, spread: float) -> list[Any]:
    """Arguments like those of the call, of drawn numbers."""
    shapes = [a for a in args if isinstance(a, Shape)]
    extents = sorted({n for a in shapes for n in a.shape if n > SHORT}, reverse=True)
    to = {n: SHORT - i % 8 for i, n in enumerate(extents)} if short else {}
    drawn = torch.Generator().manual_seed(0)
    drawn_args: list[Any] = []
    room = MOST
    for a in args:
        if not isinstance(a, Shape):
            drawn_args.append(a)
            continue
        shape = [to.get(n, n) for n in a.shape]
        room -= torch.Size(shape).numel()
        if room < 0:
            raise MemoryError("its arguments are too big")
        if a.dtype.is_floating_point or a.dtype.is_complex:
            dtype = torch.float64 if a.dtype.is_floating_point else torch.complex128
            x = spread * draw(shape, generator=drawn, dtype=dtype)
            drawn_args.append(x.requires_grad_(a.wants_gradient))
        else:
            drawn_args.append(torch.randint(2, shape, generator=drawn).to(a.dtype))
    return drawn_args
