"""A user's torch.autograd.Function: its forward is read, and its own backward kept.

A program's derivatives are those of the operations that forward is made of. Where the
backward is another (a straight-through estimator, a reversed or scaled gradient), which
is found out by trying both on drawn numbers, forward is spelled so that it has that
backward: y.detach() + (z - z.detach()), where z is B^T x, for a backward dx = B dy. For
dx = B dy + c, as of what adds a balance loss of its own, c x is added to the loss in
the same way. Any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.overrides import TorchFunctionMode

from ...errors import CaptureError
from ..forward.function_calls import Apply, through_checkpoints
from ..forward.function_operations import (
    Call,
    Shape,
    run_forward,
    shape_of,
    wants,
    with_backward,
)
from ..forward.own_collectives import OwnCollectives
from ..forward.user_frames import at_work

# Elements of all arguments together: more are not tried.
MOST = 1 << 25
SHORT = 24  # extents that dims are shortened to, counted down from here
CLOSE = 1e-4  # the relative error of a derivative, in float64; some round on the way
# Of operands and cotangents that are tried: what clips them does so somewhere.
SPREADS, SCALES = (1.0, 100.0), (1.0, 1e-9, 1e9)
IGNORED = -100  # what labels of no class are, which a loss may treat otherwise

Place = tuple[int, ...]  # of a call: which one it is, and within which
SAME_GRADIENT = (
    "write forward by tensor operations whose derivative is the one you want: "
    "x + (f(x) - x).detach() is f(x) with the gradient of x, "
    "s * x + ((1 - s) * x).detach() is x with s times its gradient"
)


class Functions:
    """The Functions that a model's forward calls, by the place of each call.

    own: the calls whose backward is to be kept, each with the arguments whose gradient
    has a part that does not depend on the one that it is given.
    added: what the loss has beside, of the last reading: scalars.
    """

    def __init__(self) -> None:
        self.calls: dict[Place, Call] = {}
        self.own: dict[Place, tuple[int, ...]] = {}
        self.added: list[Tensor] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Records a forward's Functions, and runs each as if its operations stood in
        its place."""
        self.added.clear()
        count = [0]  # of calls before; of those within a call; within that ...

        def apply(cls: Apply, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            call, place = Call(cls, tuple(map(shape_of, args)), at_work()), tuple(count)
            call = call.with_wants_of(self.calls.get(place))
            count[-1] += 1
            count.append(0)
            try:
                if torch.is_grad_enabled() and any(wants(a) for a in call.args):
                    self.calls[place] = call
                    if place in self.own:
                        made, dxs = with_backward(call, *args)
                        for i in self.own[place]:
                            self.added.append((dxs[i].detach() * args[i]).sum())
                        return made
                return run_forward(cls, *args, **kwargs)
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
        with OwnCollectives():
            constants = {kind: _own_backward(call) for kind, call in kinds.items()}
        places = {place: constants[call.kind] for place, call in self.calls.items()}
        own = {p: constant for p, constant in places.items() if constant is not None}
        known = own.keys() <= self.own.keys()
        self.own |= own
        return known

    def add_to(self, loss: Tensor) -> Tensor:
        """The loss with the gradients that Functions add to it; its value is as it
        was."""
        for term in self.added:
            loss = loss + (term - term.detach()).to(loss.dtype)
        return loss


def _own_backward(call: Call) -> tuple[int, ...] | None:
    """The arguments whose gradient has a constant part; None where the backward is the
    derivative of forward's operations."""
    name, error = f"the backward of '{call.function.__qualname__}'", None
    for short in (True, False):
        try:
            constant = _constants(call, short)
            if not constant and _derives_forward(call, short):
                return None
        except CaptureError:
            raise
        except Exception as problem:  # whatever a user's code raises
            error = problem
            continue
        try:
            if _is_derivative(call, partial(_linear, call), short):
                return constant
        except CaptureError:
            raise
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


def _linear(call: Call, *args: Any) -> Any:
    return with_backward(call, *args)[0]


def _constants(call: Call, short: bool) -> tuple[int, ...]:
    """The arguments that have a gradient where there is none to what was made."""
    args = _draw(call.args, short, torch.randn, 1.0)
    dxs = _gradients(call, call.function.apply, args, 0.0)
    places = (i for i, a in enumerate(call.args) if wants(a))
    pairs = zip(places, dxs, strict=True)
    return tuple(i for i, dx in pairs if bool((dx.isfinite() & (dx != 0)).any()))


def _derives_forward(call: Call, short: bool) -> bool:
    """Whether the backward is the derivative of forward's operations."""
    try:
        return _is_derivative(call, partial(run_forward, call.function), short)
    except RuntimeError:  # as of values that were written over
        return _is_derivative(call, _without_writes(call.function), short)


def _without_writes(cls: Apply) -> Callable[..., Any]:
    """A Function's forward as operations that autograd derives: a scan that writes over
    what it has read is one of new tensors, as it is in a program."""

    def run(*args: Any) -> Any:
        places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]

        def on_tensors(*tensors: Tensor) -> Any:
            copies = (x.clone() for x in tensors)  # it may write into them, too
            filled = dict(zip(places, copies, strict=True))
            return run_forward(cls, *(filled.get(i, a) for i, a in enumerate(args)))

        with _Copied():
            return functionalize(on_tensors)(*(args[i] for i in places))

    return run


class _Copied(TorchFunctionMode):
    """Writes a copy as 0 plus the source: autograd derives no other copy into results
    of `functionalize`."""

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
    of larger ones, where it is a number of these. And with integers that are ignored,
    where it takes them: labels, which an index may not be.
    """
    same = _agree(call, run, partial(_draw, call.args, short))
    if not same or not any(map(_may_be_ignored, call.args)):
        return same
    try:
        return _agree(call, run, partial(_draw, call.args, short, ignored=True))
    except (IndexError, RuntimeError, ValueError):
        return True


def _agree(call: Call, run: Callable[..., Any], drawn: Callable[..., Any]) -> bool:
    for spread in SPREADS:
        for draw in (torch.randn, torch.rand):
            args = drawn(draw, spread)
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
    """The gradients by the Function's backward, without its constant part, and those by
    the operations of `run`."""
    both: tuple[list[Tensor], list[Tensor]] = ([], [])
    constant = _gradients(call, call.function.apply, args, 0.0)
    for scale in SCALES:
        dxs = _gradients(call, call.function.apply, args, scale)
        both[0].extend((a - b) / scale for a, b in zip(dxs, constant, strict=True))
        both[1].extend(dx / scale for dx in _gradients(call, run, args, scale))
    return both


def _run_within(node: Any, mode: TorchFunctionMode) -> None:
    """Lets a node of autograd run within a mode: while it derives there are none."""
    node.register_prehook(lambda _: mode.__enter__() and None)
    node.register_hook(lambda *_: mode.__exit__(None, None, None))


def _gradients(
    call: Call, run: Callable[..., Any], args: list[Any], scale: float
) -> list[Tensor]:
    """The gradients of a call's arguments, for drawn and scaled cotangents."""
    xs = [x for x, a in zip(args, call.args, strict=True) if wants(a)]
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        # Copies, as some write into what they are given.
        made = run(*(a.clone() if isinstance(a, Tensor) else a for a in args))
        drawn = torch.Generator().manual_seed(1)
        many = made if isinstance(made, tuple) else (made,)
        ys = [y for y in many if isinstance(y, Tensor)]
        for node in {y.grad_fn for y in ys} - {None}:
            _run_within(node, OwnCollectives())
        dys = [scale * torch.randn(y.shape, generator=drawn).to(y.dtype) for y in ys]
        ends = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
        if not ends:
            return [torch.zeros_like(x) for x in xs]
        dxs = torch.autograd.grad(
            [y for y, _ in ends], xs, [dy for _, dy in ends], allow_unused=True
        )
    return [
        torch.zeros_like(x) if dx is None else dx for x, dx in zip(xs, dxs, strict=True)
    ]


def _may_be_ignored(arg: Any) -> bool:
    """Whether an argument may have labels of no class among it."""
    return isinstance(arg, Shape) and arg.dtype in (torch.int32, torch.int64)


def _draw(
    args: tuple[Any, ...],
    short: bool,
    draw: Any,
    spread: float,
    ignored: bool = False,
) -> list[Any]:
    """Arguments like those of the call, of drawn numbers. ignored: a third of integers
    are labels of no class."""
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
        elif ignored and _may_be_ignored(a):
            x = torch.randint(3, shape, generator=drawn).to(a.dtype)
            drawn_args.append(x.masked_fill(x == 2, IGNORED))
        else:
            drawn_args.append(torch.randint(2, shape, generator=drawn).to(a.dtype))
    return drawn_args
