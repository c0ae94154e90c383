"""Runs the untouched model, for programs to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, finfo, nn
from torch.overrides import TorchFunctionMode

from autopar.capture.capture_model import capture_model
from autopar.capture.left_as_found import AsFound
from autopar.passes.capture.forward.call_model import loss_of
from autopar.passes.capture.mixed_precision import Lowering, low_dtype
from autopar.passes.program import Program
from autopar.passes.traced import Traced
from autopar.progress import tell
from autopar.proof.differences import result_of_model
from autopar.proof.draw_values import draw_buffers
from autopar.proof.drawn import drawn_batch, drawn_weights, is_finite, with_values
from autopar.proof.errors import NOISE, as_reals, root_mean_square
from autopar.proof.in_double import forward_dtype, held_in_double, tree_in_double
from autopar.proof.interpret import run_graph
from autopar.proof.ranks import StepResult
from autopar.proof.reference import OurChance, reference_step
from autopar.proof.reference_runs import Arithmetic, ReferenceRuns
from autopar.proof.update import Update
from autopar.runtime.comm.routing_replay import Choosing, RoutingReplay

# Relative error that rounding explains without a second look, by dtype of the
# parameters.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
# The same for what is computed in mixed precision: so many roundings of its dtype
# (0.03 for bfloat16, 0.004 for float16).
ROUNDINGS = 4

# What may be drawn.
WEIGHTS, BATCH = "weights", "batch"
# In this order, until the model gives finite numbers; of batches, first a harsh one.
ATTEMPTS = (((WEIGHTS, BATCH), False), ((WEIGHTS, BATCH), True), ((WEIGHTS,), True))
TRIES = 4  # to find values with which everything has a gradient
STEPS = 2  # of what is drawn: what one step leaves behind must not show in the next


@dataclass(frozen=True)
class Expected:
    """One step of the untouched model, to compare programs with.

    result: what it computes; in mixed precision under autocast. made: what its routers
    chose. exact: of the model in its own precision, told so, where that is mixed.
    reference: tells rounding from faults. drawn: of weights and batch. buffers: those
    that were drawn, too. update: what follows the gradients, if that is compared too.
    masks: whether the step had dropout, if the model has.
    """

    weights: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    result: StepResult
    tolerance: float
    reference: ReferenceRuns
    made: tuple[Tensor, ...] = ()
    exact: StepResult | None = None
    drawn: tuple[str, ...] = ()
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    update: Update | None = None
    masks: bool = True


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
    tell("running the untouched model")
    as_found = AsFound.of(model, loss_fn)
    subject = Subject(program, model, batch, loss_fn, tolerance, as_found)
    for drawn_fields, gentle in ATTEMPTS if drawn else ():
        best: list[Expected] = []
        for first in range(seed, seed + TRIES * STEPS, STEPS):
            made = _draw_steps(subject, batch, seed, Draw(first, drawn_fields, gentle))
            if best and len(unmoved(made)) >= len(unmoved(best)):
                break
            best = made
            if not best or not unmoved(best):
                break
        if best:
            return best
    one = _expect(subject, batch, seed << 32, ())
    assert one is not None, "what is given is compared as it is"
    return [one]


@dataclass(frozen=True)
class Subject:
    """The program to run, and the model as it was before. batch: an example."""

    program: Program
    model: nn.Module
    batch: Mapping[str, Any]
    loss_fn: Callable[..., Any] | None
    tolerance: float | None
    as_found: AsFound

    @cached_property
    def traced(self) -> Traced:
        return capture_model(self.model, self.batch, self.loss_fn)

    @property
    def evaluates(self) -> bool:
        """Whether the model evaluates to another loss, which is known."""
        program = self.program
        masks = program.has_dropout and not program.own_masks
        return masks and not program.draw


@dataclass(frozen=True)
class Draw:
    """seed: of the first step. fields: those drawn. gentle: see `draw_batch`."""

    seed: int
    fields: tuple[str, ...]
    gentle: bool


def _draw_steps(
    subject: Subject, batch: Mapping[str, Any], seed: int, draw: Draw
) -> list[Expected]:
    """Runs steps of the model on drawn values; none if it cannot run one of them."""
    model = subject.model
    buffers = draw_buffers(dict(model.named_buffers()), draw.seed)
    steps = []
    for number in range(STEPS):
        drawn, own = batch, draw.seed + number
        if BATCH in draw.fields:
            # Of the last batch each sample counts: what a rank does wrong must show.
            gentle = draw.gentle or number == STEPS - 1
            drawn = drawn_batch(subject.program, batch, own, gentle)
        with drawn_weights(model, own, buffers):
            made = _expect(subject, drawn, (seed << 32) + number, draw.fields)
        if made is None:
            return []
        steps.append(replace(made, buffers=buffers))
    return steps


def unmoved(steps: Sequence[Expected]) -> tuple[str, ...]:
    """Parameters whose gradient is, in each step, so small that it could be missing
    and no error would show: mostly 0."""
    dead: set[str] | None = None
    for step in steps:
        gradients = step.result.gradients
        least = step.tolerance * NOISE * root_mean_square(gradients.values())
        still = {
            name
            for name, grad in gradients.items()
            if not as_reals(grad).norm().item() > least * grad.numel() ** 0.5
        }
        dead = still if dead is None else dead & still
    return tuple(sorted(dead or ()))


def _expect(
    subject: Subject, batch: Mapping[str, Any], key: int, drawn: tuple[str, ...]
) -> Expected | None:
    """One step of the model; None if it cannot take what was drawn for it."""
    model, precision = subject.model, subject.program.plan.lowering
    masks = not subject.program.own_masks
    drawing = key if masks else None
    routers = Choosing()
    try:
        with _Seen() as seen:
            want = reference_step(
                model, batch, subject.loss_fn, drawing, precision, routers
            )
    except (AssertionError, IndexError, RuntimeError, ValueError):
        if not drawn:
            raise
        return None
    if drawn and not is_finite(*want):
        return None
    weights = {name: p.detach() for name, p in model.named_parameters()}
    values = {**weights, **{name: b.detach() for name, b in model.named_buffers()}}
    made, allowed = tuple(routers.made), subject.tolerance
    step = _Step(subject, batch, drawing, values, made, tuple(seen.told))
    return Expected(
        weights,
        {k: v for k, v in batch.items() if isinstance(v, Tensor)},
        result_of_model(*want, step.evaluated(batch, precision, Choosing())),
        rounding(model, precision, seen.narrowest) if allowed is None else allowed,
        ReferenceRuns(step.run),
        made,
        step.told(batch, None) if precision else None,
        drawn,
        masks=masks,
    )


@dataclass(frozen=True)
class _Step:
    """One step of the model, that can be run again with the choices that it made.
    values: of parameters and buffers. limits: see `Limits`."""

    subject: Subject
    batch: Mapping[str, Any]
    key: int | None
    values: Mapping[str, Tensor]
    made: tuple[Tensor, ...]
    limits: tuple[finfo, ...]

    def run(self, arithmetic: Arithmetic) -> StepResult:
        """Runs the step in an arithmetic; in float64 without autocast."""
        batch, own = dict(self.batch), dict(self.values)
        precision, model = self.subject.program.plan.lowering, self.subject.model
        dtype, as_found = forward_dtype(model, precision), self.subject.as_found
        held: list[Tensor] = []
        as_found.put_back()  # what forward keeps is of its precision
        if arithmetic.double:
            batch, own = tree_in_double(batch), tree_in_double(own)
            held, precision = [x for x, _ in as_found.tensors], None
        try:
            with with_values(model, own), held_in_double(held, dtype), arithmetic:
                return self.told(batch, precision)
        except (AssertionError, RuntimeError, TypeError, ValueError):
            if not arithmetic.double:
                raise
        finally:
            as_found.put_back()
        return self.captured({**batch, **own}, arithmetic)

    def captured(self, values: Mapping[str, Any], arithmetic: Arithmetic) -> StepResult:
        """The same by the model's operations, as captured: forward may look at dtypes,
        and take no float64."""
        traced, without = self.subject.traced, None
        values, replay = {**values, **traced.literals}, RoutingReplay(self.made)
        with arithmetic, Choosing(replay):
            loss, gradients, _ = run_graph(traced, values, self.key)
        if self.subject.evaluates:
            with arithmetic, Choosing(RoutingReplay(self.made)):
                without = run_graph(traced, values, None)[0]
        margin = replay.margin if replay.differing else None
        return result_of_model(loss, gradients, without, margin)

    def told(self, batch: Mapping[str, Any], dtype: Lowering) -> StepResult:
        """dtype: what the model runs in."""
        subject, replay = self.subject, RoutingReplay(self.made)
        model, loss_fn = subject.model, subject.loss_fn
        with Limits(self.limits):
            step = reference_step(
                model, batch, loss_fn, self.key, dtype, Choosing(replay)
            )
        margin = replay.margin if replay.differing else None
        without = self.evaluated(batch, dtype, Choosing(RoutingReplay(self.made)))
        return result_of_model(*step, without, margin)

    def evaluated(
        self, batch: Mapping[str, Any], dtype: Lowering, choosing: Choosing
    ) -> Tensor | None:
        """The loss without dropout, where there is dropout."""
        if dtype or not self.subject.evaluates:
            return None
        limits = Limits(self.limits)
        with OurChance(None), limits, choosing, torch.no_grad():
            return loss_of(self.subject.model, batch, self.subject.loss_fn)


class Limits(TorchFunctionMode):
    """Tells a model the limits of dtypes that it asks for, and norms without an eps,
    which have another one for each. recorded: in order, of which dtypes, whatever is
    computed in now; None: of the dtype that it is. told: the same, as noted."""

    def __init__(self, recorded: Sequence[finfo] | None = None) -> None:
        super().__init__()
        self.recorded = None if recorded is None else list(recorded)
        self.told: list[finfo] = []

    def __enter__(self) -> Any:
        vars(torch)["finfo"] = self.limits
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        vars(torch)["finfo"] = finfo
        super().__exit__(*error)

    def limits(self, *dtype: Any, **named: Any) -> finfo:
        if self.recorded is None:
            self.told.append(finfo(*dtype, **named))
        elif not self.recorded:
            raise ValueError("the model asks for more limits of dtypes than before")
        else:
            self.told.append(self.recorded.pop(0))
        return self.told[-1]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        if func in NORMS and _has_no_eps(*args, **keywords):
            dtype = (args[0] if args else keywords["input"]).dtype
            limits = self.limits(torch.promote_types(dtype, torch.float32))
            args, keywords = args[:3], {**keywords, "eps": limits.eps}
        return func(*args, **keywords)


class _Seen(Limits):
    """Notes in which precision, at least, a model computes what it differentiates: one
    in float64 may have norms or a router in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.narrowest = torch.float64

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        for x in result if isinstance(result, tuple | list) else (result,):
            is_real = isinstance(x, Tensor) and x.is_floating_point()
            if is_real and x.requires_grad and x.itemsize < self.narrowest.itemsize:
                self.narrowest = x.dtype
        return result


NORMS = (torch.rms_norm, F.rms_norm)


def _has_no_eps(
    input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> bool:
    return eps is None


def rounding(model: nn.Module, precision: Lowering, narrowest: torch.dtype) -> float:
    """The relative error that is explained by the precision that a model computes in,
    alone (its narrowest) or lowered."""
    dtype = next(p.dtype for p in model.parameters())
    low = low_dtype(precision)
    if low is None or dtype is torch.float64:  # which is left alone
        return max(TOLERANCE.get(d, 2e-2) for d in (dtype, narrowest))
    return ROUNDINGS * finfo(low).eps
