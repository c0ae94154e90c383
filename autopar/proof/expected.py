"""What the untouched model computes, for programs to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.proof.draw_values import draw_buffers
from autopar.proof.drawn import drawn_batch, drawn_weights, is_finite
from autopar.proof.errors import root_mean_square
from autopar.proof.ranks import NOISE
from autopar.proof.update import Update
from autopar.runtime.choices import Choices, Choosing
from autopar.training.reference import OurDropout, reference_step
from passes.capture.call_model import loss_of
from passes.program import Program

# Relative error that rounding explains, by dtype of the parameters.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
# The same for what is computed in mixed precision: so many roundings of its dtype
# (0.03 for bfloat16, 0.004 for float16).
ROUNDINGS = 4

# A loss, and gradients by the model's own names.
Gradients = tuple[Tensor, Mapping[str, Tensor]]

# What may be drawn.
WEIGHTS, BATCH = "weights", "batch"
# In this order, until the model gives finite numbers; of batches, first a harsh one.
ATTEMPTS = (((WEIGHTS, BATCH), False), ((WEIGHTS, BATCH), True), ((WEIGHTS,), True))
TRIES = 4  # to find values with which everything has a gradient
STEPS = 2  # of what is drawn: what one step leaves behind must not show in the next


@dataclass(frozen=True)
class Expected:
    """One step of the untouched model, to compare programs with.

    found: what it computes; in mixed precision under autocast, with `made`, what its
    routers chose. exact: of the model in its own precision, told so; `margin`: by how
    much it preferred others. norm: of all gradients. evaluated: the loss without
    dropout, where there is dropout. drawn: of weights and batch. buffers: those that
    were drawn, too. update: what follows the gradients, if that is compared too.
    """

    weights: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    found: Gradients
    tolerance: float
    made: tuple[Tensor, ...] | None = None
    exact: Gradients | None = None
    margin: float = 0.0
    evaluated: Tensor | None = None
    drawn: tuple[str, ...] = ()
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    update: Update | None = None


def expect(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    drawn: bool = True,
) -> list[Expected]:
    """Run the model on what programs are to be compared on, a step at a time.

    What has no gradient in any step (`unmoved`) is hardly compared: a query of a single
    key, an expert without tokens. So other values are drawn as long as that helps.
    """
    for what, gentle in ATTEMPTS if drawn else ():
        best: list[Expected] = []
        for first in range(seed, seed + TRIES * STEPS, STEPS):
            draw = Draw(first, what, gentle)
            made = _draw_steps(program, model, batch, loss_fn, seed, tolerance, draw)
            if best and len(unmoved(made)) >= len(unmoved(best)):
                break
            best = made
            if not best or not unmoved(best):
                break
        if best:
            return best
    one = _expect(program, model, batch, loss_fn, seed << 32, tolerance, ())
    assert one is not None, "what is given is compared as it is"
    return [one]


@dataclass(frozen=True)
class Draw:
    """seed: of the first step. what: is drawn. gentle: see `draw_batch`."""

    seed: int
    what: tuple[str, ...]
    gentle: bool


def _draw_steps(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
    seed: int,
    tolerance: float | None,
    draw: Draw,
) -> list[Expected]:
    """Steps of the model on what is drawn; none if it cannot take one of them."""
    buffers = draw_buffers(dict(model.named_buffers()), draw.seed)
    steps = []
    for number in range(STEPS):
        given, own = batch, draw.seed + number
        if BATCH in draw.what:
            # Of the last batch each sample counts: what a rank does wrong must show.
            gentle = draw.gentle or number == STEPS - 1
            given = drawn_batch(program, batch, own, gentle)
        with drawn_weights(model, own, buffers):
            key = (seed << 32) + number
            made = _expect(program, model, given, loss_fn, key, tolerance, draw.what)
        if made is None:
            return []
        steps.append(replace(made, buffers=buffers))
    return steps


def unmoved(steps: Sequence[Expected]) -> tuple[str, ...]:
    """Parameters whose gradient is, in each step, so small that it could be missing
    and no error would show: mostly 0."""
    dead: set[str] | None = None
    for step in steps:
        gradients = step.found[1]
        least = step.tolerance * NOISE * root_mean_square(gradients.values())
        still = {
            name
            for name, grad in gradients.items()
            if not grad.double().norm().item() > least * grad.numel() ** 0.5
        }
        dead = still if dead is None else dead & still
    return tuple(sorted(dead or ()))


def _expect(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
    key: int,
    tolerance: float | None,
    drawn: tuple[str, ...],
) -> Expected | None:
    """One step of the model; None if it cannot take what was drawn for it."""
    precision = program.plan.dtype
    routers = Choosing() if precision else None
    try:
        with _Narrowest() as seen:
            want = reference_step(model, batch, loss_fn, key, precision, routers)
    except (AssertionError, IndexError, RuntimeError, ValueError):
        if not drawn:
            raise
        return None
    if drawn and not is_finite(*want):
        return None
    expected = Expected(
        {name: p.detach() for name, p in model.named_parameters()},
        {k: v for k, v in batch.items() if isinstance(v, Tensor)},
        want,
        rounding(model, precision, seen.dtype) if tolerance is None else tolerance,
        drawn=drawn,
    )
    if routers is not None:
        told = Choices(routers.made)
        choosing = Choosing(told)
        exact = reference_step(model, batch, loss_fn, key, choosing=choosing)
        made = tuple(routers.made)
        return replace(expected, made=made, exact=exact, margin=told.margin)
    if any("dropout" in text for text in program.modules.values()):
        with OurDropout(None), torch.no_grad():
            evaluated = loss_of(model, batch, loss_fn)
        return replace(expected, evaluated=evaluated)
    return expected


class _Narrowest(TorchFunctionMode):
    """Notes in which precision, at least, a model computes what it differentiates: one
    in float64 may have norms or a router in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            is_real = isinstance(x, Tensor) and x.is_floating_point()
            if is_real and x.requires_grad and x.itemsize < self.dtype.itemsize:
                self.dtype = x.dtype
        return found


def rounding(
    model: nn.Module, precision: torch.dtype | None, narrowest: torch.dtype
) -> float:
    """The relative error that is explained by the precision that a model computes in,
    alone (its narrowest) or under autocast."""
    dtype = next(p.dtype for p in model.parameters())
    if precision is None or dtype is torch.float64:  # autocast leaves float64 alone
        return max(TOLERANCE.get(d, 2e-2) for d in (dtype, narrowest))
    return ROUNDINGS * torch.finfo(precision).eps
