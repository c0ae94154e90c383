"""A user's torch.autograd.Function: the capture reads its forward, not its backward.

A program's derivatives are those of the operations that forward is made of. So a
backward must be the derivative of its forward, which is found out by trying both on
drawn numbers; one that is not (a straight-through estimator, a reversed or scaled
gradient) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from passes.capture.user_frames import at_work
from passes.errors import CaptureError

Apply = type[torch.autograd.Function]

CHECKPOINT = ("torch.utils.checkpoint", "CheckpointFunction")
# Elements of all arguments together: more are not tried.
MOST = 1 << 25
SHORT = 24  # extents that dims are shortened to, counted down from here
CLOSE = 1e-4  # the relative error of a derivative, in float64; some round on the way

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
    def key(self) -> tuple[object, ...]:
        return (self.function, *map(repr, self.args))


@contextmanager
def read_forwards() -> Iterator[dict[tuple[object, ...], Call]]:
    """Within, a Function's forward runs as if its operations stood in its place, and
    calls are noted: what is yielded has one of each kind."""
    calls: dict[tuple[object, ...], Call] = {}

    def apply(cls: Apply, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = Call(cls, tuple(map(_shape, args)), at_work())
        if torch.is_grad_enabled() and any(_wants(a) for a in call.args):
            calls.setdefault(call.key, call)
        return _forward(cls, args, kwargs)

    with through_checkpoints(apply):
        yield calls


@contextmanager
def through_checkpoints(users: Callable[..., Any] | None = None) -> Iterator[None]:
    """Within, a reentrant checkpoint is the function that it would run once more.

    users: what to call instead of a Function of a user's, with its class, arguments
    and keywords.
    """
    # Not of Function itself: `square = Square.apply` at the top of a file has that.
    beneath: Any = torch.autograd.Function.__mro__[1]

    def apply(cls: Apply, *args: Any, **kwargs: Any) -> Any:
        if (cls.__module__, cls.__name__) == CHECKPOINT:
            run, _, *operands = args  # recomputation is decided elsewhere
            return run(*operands)
        # Torch's own are of custom operators, which stay as they are.
        if users is None or cls.__module__.partition(".")[0] == "torch":
            return super(beneath, cls).apply(*args, **kwargs)
        return users(cls, args, kwargs)

    assert "apply" not in vars(beneath), "torch.autograd.Function is built otherwise"
    beneath.apply = classmethod(apply)
    try:
        yield
    finally:
        del beneath.apply


def _forward(cls: Apply, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a Function's forward as plain operations."""
    if cls.setup_context is not torch.autograd.Function.setup_context:
        return cls.forward(*args, **kwargs)
    ctx: Any = FunctionCtx()
    ctx.needs_input_grad = tuple(_wants(_shape(a)) for a in args)
    made = cls.forward(ctx, *args, **kwargs)
    constant = {id(x) for x in getattr(ctx, "non_differentiable", ())}
    if isinstance(made, tuple):
        return tuple(x.detach() if id(x) in constant else x for x in made)
    return made.detach() if id(made) in constant else made


def _shape(arg: Any) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    return Shape(tuple(arg.shape), arg.dtype, arg.requires_grad)


def _wants(arg: Any) -> bool:
    return isinstance(arg, Shape) and arg.wants_gradient


# --- whether a backward is the derivative ------------------------------------------


def check_derivatives(calls: Mapping[tuple[object, ...], Call]) -> None:
    """Raises CaptureError for a Function whose backward is not its forward's
    derivative, or which could not be tried."""
    for call in calls.values():
        error = None
        for short in (True, False):
            try:
                same = _is_derivative(call, short)
            except Exception as problem:  # whatever a user's code raises
                error = problem
                continue
            if same:
                break
            raise CaptureError(
                f"the backward of '{call.function.__qualname__}' is not the derivative "
                "of its forward, which is what the capture reads",
                source=call.source,
                fix=SAME_GRADIENT,
            )
        else:
            said = f": {type(error).__name__}: {error}" if error else ""
            raise CaptureError(
                f"whether the backward of '{call.function.__qualname__}' is the "
                f"derivative of its forward could not be tried on drawn numbers{said}",
                source=call.source,
                fix=SAME_GRADIENT,
            ) from error


def _is_derivative(call: Call, short: bool) -> bool:
    """Compare both on drawn numbers in float64; short: with shortened dims.

    Of all signs first; between 0 and 1 where that is no number, as of a logarithm.
    """
    for draw in (torch.randn, torch.rand):
        wanted, found = _both_gradients(call, _draw(call.args, short, draw))
        if all(bool(x.isfinite().all()) for x in wanted):
            return all(
                bool((a - b).norm() <= CLOSE * max(1e-6, float(a.norm())))
                for a, b in zip(wanted, found, strict=True)
            )
    raise ValueError("its gradient is infinite or not a number")


def _both_gradients(call: Call, args: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """By the Function's backward, and by the operations of its forward."""
    xs = [x for x, a in zip(args, call.args, strict=True) if _wants(a)]

    def given() -> list[Any]:  # copies, as some write into what they are given
        return [a.clone() if isinstance(a, Tensor) else a for a in args]

    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        own = _differentiable(call.function.apply(*given()))
        torch.default_generator.manual_seed(0)
        plain = _differentiable(_forward(call.function, tuple(given()), {}))
        drawn = torch.Generator().manual_seed(1)
        dys = [torch.randn(y.shape, generator=drawn).to(y.dtype) for y in own]
        wanted = _gradients(own, xs, dys)
        if len(plain) != len(own):
            return wanted, [torch.zeros_like(x) for x in xs]
        return wanted, _gradients(plain, xs, dys)


def _differentiable(made: Any) -> list[Tensor]:
    many = made if isinstance(made, tuple) else (made,)
    return [y for y in many if isinstance(y, Tensor) and y.requires_grad]


def _gradients(ys: list[Tensor], xs: list[Tensor], dys: list[Tensor]) -> list[Tensor]:
    if not ys:
        return [torch.zeros_like(x) for x in xs]
    found = torch.autograd.grad(ys, xs, dys, allow_unused=True)
    return [
        torch.zeros_like(x) if dx is None else dx
        for x, dx in zip(xs, found, strict=True)
    ]


def _draw(args: tuple[Any, ...], short: bool, draw: Any) -> list[Any]:
    """Arguments like those of the call, of drawn numbers."""
    shapes = [a for a in args if isinstance(a, Shape)]
    extents = sorted({n for a in shapes for n in a.shape if n > SHORT}, reverse=True)
    to = {n: SHORT - i % 8 for i, n in enumerate(extents)} if short else {}
    drawn = torch.Generator().manual_seed(0)
    found: list[Any] = []
    room = MOST
    for a in args:
        if not isinstance(a, Shape):
            found.append(a)
            continue
        shape = [to.get(n, n) for n in a.shape]
        room -= torch.Size(shape).numel()
        if room < 0:
            raise MemoryError("its arguments are too big")
        if a.dtype.is_floating_point or a.dtype.is_complex:
            dtype = torch.float64 if a.dtype.is_floating_point else torch.complex128
            x = draw(shape, generator=drawn, dtype=dtype)
            found.append(x.requires_grad_(a.wants_gradient))
        else:
            found.append(torch.randint(2, shape, generator=drawn).to(a.dtype))
    return found
