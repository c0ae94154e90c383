"""The captured graph beside the untouched model: that what is compiled is what the user
wrote.

Programs are proved against the graph, so a forward that does one thing eagerly and
another while it is captured would be proved to be what it is not. A model that is small
runs here as its user runs it, and the graph beside it, both in float64. Of a larger one
a few layers are called eagerly and as they are when captured, with few tokens: what
they ask of torch, and with what, must be the same; where loops over experts became one
step, `beside_loops` compares these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.capture_model import capture_model
from autopar.capture.left_as_found import AsFound, left_as_found
from autopar.capture.shorten import of_few_layers
from autopar.passes.capture.called import Call, Calls
from autopar.passes.capture.exported.buffer_updates import after_step
from autopar.passes.capture.forward.call_model import loss_of
from autopar.passes.capture.forward.user_frames import at_work
from autopar.passes.capture.mixed_precision import (
    Lowering,
    autocast,
    parameters_in,
)
from autopar.passes.capture.trace import run_without_data
from autopar.passes.errors import AutoparError, CaptureError
from autopar.passes.layers import Layers
from autopar.passes.ops.random import DRAWN
from autopar.passes.proof_record import CALLS, NUMBERS, Beside
from autopar.passes.traced import Traced
from autopar.progress import tell
from autopar.proof.beside_loops import compare_loops
from autopar.proof.differences import differences, result_of_model
from autopar.proof.drawn import with_values
from autopar.proof.expected import Limits
from autopar.proof.in_double import forward_dtype, held_in_double, tree_in_double
from autopar.proof.interpret import run_graph
from autopar.proof.ranks import StepResult, VerificationFailed
from autopar.proof.reference import OurChance, reference_step
from autopar.proof.reference_runs import Arithmetic, default_dtype
from autopar.proof.values import ByName, draw_values, real_values, values_of_buffers

TOLERANCE = 1e-9  # rounding of float64, through some thousand operations
LITTLE = 1e8  # floating point operations of a forward that is run as it is
SAMPLES, TOKENS = 2, 16  # of a batch on which a larger model is called
# Parameters of which every gradient is compared, and with which anything is run.
MANY, MOST = 1e7, 3e8

# What a forward may raise on values that it is not made for.
REFUSED = (AssertionError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Untouched:
    """A model as its user calls it. batch: an example. precision: what the model runs
    in while it is captured."""

    model: nn.Module
    batch: Mapping[str, Any]
    loss_fn: Callable[..., Any] | None
    precision: Lowering

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def run_beside_model(
    untouched: Untouched, traced: Traced, flops: float, seed: int = 0
) -> Beside:
    """Compares what was captured with the model.

    flops: of a forward of the batch. Raises: VerificationFailed, with the user's line,
    where loss or a gradient is another one.
    """
    beside = _compare(untouched, traced, flops, seed)
    if beside.by == NUMBERS or not traced.loops:
        return beside
    loops = compare_loops(*traced.loops, real_values(untouched.model), seed)
    return replace(beside, loops=loops)


def _compare(untouched: Untouched, traced: Traced, flops: float, seed: int) -> Beside:
    if any(p.is_meta for p in untouched.model.parameters()):
        return Beside(why="it has no weights here")
    tell("proof: the untouched model")
    with left_as_found(untouched.model, untouched.loss_fn):
        if flops <= LITTLE:
            return _compare_numbers(untouched, traced, seed)
        few = replace(untouched, batch=_few_tokens(untouched.batch))

        def compare(_: Layers) -> Beside | None:
            beside = _compare_calls(few, seed)
            return beside if beside.by else None

        layers, beside = of_few_layers(untouched.model, compare)
        if layers and beside:
            return replace(beside, layers=(layers.kept, layers.total))
        # All of them, where forward looks for its layers by their numbers.
        return _compare_calls(few, seed)


# --- numbers --------------------------------------------------------------------


def _compare_numbers(untouched: Untouched, traced: Traced, seed: int) -> Beside:
    model, batch = untouched.model, untouched.batch
    key = None if traced.own_masks else seed
    if traced.own_masks and any(n.name in DRAWN for n in traced.graph.nodes):
        return Beside(why="it draws numbers, and has dropout of chosen rows")
    like = {name: x.cpu() for name, x in real_values(model).items()}
    buffers = values_of_buffers(traced.graph.buffers, like, seed)
    problem = "it gives no finite numbers"
    for weights, inputs in draw_values(traced, like, batch, seed):
        values = {**like, **weights}
        try:
            limits = _limits(untouched, values, inputs, key)
            graph = {**inputs, **weights, **buffers, **traced.literals}
            with default_dtype(torch.float64):
                loss, gradients, outputs = run_graph(traced, graph, key)
                ours = result_of_model(loss, gradients, outputs=outputs)
                want = _in_double(untouched, values, inputs, key, limits)
        except (AutoparError, *REFUSED) as error:
            problem = str(error).partition("\n")[0]
            continue
        if not all(bool(x.isfinite().all()) for x in (want.loss, ours.loss)):
            continue
        return _agreed(untouched, ours, want, set(ours.gradients))
    return Beside(why=f"it does not run in float64 ({problem})")


def _limits(
    untouched: Untouched, values: ByName, inputs: ByName, key: int | None
) -> tuple[torch.finfo, ...]:
    """The limits of dtypes that forward asks for where it is captured. Tables that it
    keeps for later are not those of a forward in double precision."""
    model, precision = untouched.model, untouched.precision
    batch = {**untouched.batch, **inputs}
    with (
        left_as_found(model, untouched.loss_fn),
        with_values(model, values),
        parameters_in(model, precision),
        OurChance(key),
        autocast(precision, "cpu"),
        Limits() as limits,
        torch.no_grad(),
    ):
        loss_of(model, batch, untouched.loss_fn)
    return tuple(limits.told)


def _in_double(
    untouched: Untouched,
    values: ByName,
    inputs: ByName,
    key: int | None,
    limits: tuple[torch.finfo, ...],
) -> StepResult:
    model = untouched.model
    batch = tree_in_double({**untouched.batch, **inputs})
    dtype = forward_dtype(model, untouched.precision)
    with (
        left_as_found(model, untouched.loss_fn) as as_found,
        with_values(model, tree_in_double(values)),
        held_in_double((x for x, _ in as_found.tensors), dtype),
        Arithmetic(double=True),
        Limits(limits),
    ):
        written: dict[str, Tensor] = {}
        step = reference_step(model, batch, untouched.loss_fn, key, written=written)
    outputs = {after_step(name): x for name, x in written.items()}
    return result_of_model(*step, outputs=outputs)


def _agreed(
    untouched: Untouched, ours: StepResult, want: StepResult, compared: set[str]
) -> Beside:
    """The error of a step that both have computed. Raises: VerificationFailed."""
    gradients = {
        name: g for name, g in want.gradients.items() if name in compared or g.any()
    }
    if not compared:  # the loss alone
        gradients = {}
    wanted = result_of_model(want.loss, gradients, outputs=want.outputs)
    errors = differences(ours, wanted)
    worst = max(errors, key=errors.__getitem__)
    if errors[worst] <= TOLERANCE:
        return Beside(NUMBERS, len(errors), worst, errors[worst])
    other = None
    with contextlib.suppress(AutoparError, *REFUSED):  # then nobody knows the line
        other = _first_other(*_called(untouched))
    name = f"gradient of '{worst}'" if worst in gradients else worst
    raise VerificationFailed(
        f"the model computes something else while it is captured than eagerly: the "
        f"{name} is {errors[worst]:.0e} off" + (other.text if other else ""),
        source=other.line if other else "",
        fix="let forward do the same whether it is captured or not"
        if other
        else "report this model; compile with prove=False (--unproved) runs what was "
        "captured",
    )


# --- calls ------------------------------------------------------------------------


class _Lines(Calls):
    """Calls, with the user's line of each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.lines: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = len(self.parts[0])
        result = super().__torch_function__(func, types, args, kwargs)
        self.lines += [at_work()] * (len(self.parts[0]) - before)
        return result


@dataclass(frozen=True)
class _Other:
    """The first call that differs. line: of the user's source."""

    text: str
    line: str


def _compare_calls(untouched: Untouched, seed: int) -> Beside:
    """Compares calls, or a step where these differ or cannot be seen."""
    count, problem = untouched.parameters, ""
    try:
        eager, captured = _called(untouched)
        other = _first_other(eager, captured)
        if other is None:
            return Beside(CALLS, len(eager.parts[0]))
        problem = f"its calls differ{other.text} ({other.line})"
    except (AutoparError, *REFUSED) as error:
        problem = str(error).partition("\n")[0]
    if count > MOST:
        return Beside(why=problem)
    try:
        traced = capture_model(
            untouched.model, untouched.batch, untouched.loss_fn, untouched.precision
        )
    except AutoparError as error:
        return Beside(why=f"on {SAMPLES} x {TOKENS} tokens, {error.message}")
    if count > MANY:
        traced = replace(traced, trainable=frozenset())
    return _compare_numbers(untouched, traced, seed)


def _called(untouched: Untouched) -> tuple[_Lines, _Lines]:
    """The calls of forward, eager and captured."""
    model, batch, loss_fn = untouched.model, untouched.batch, untouched.loss_fn
    precision, as_found = untouched.precision, AsFound.of(model)
    eager, captured = _Lines(model), _Lines(model)
    device = next(p.device for p in model.parameters())
    real = {
        k: x.to(device, copy=True) if isinstance(x, Tensor) else x
        for k, x in batch.items()
    }
    tensors = {k: x for k, x in real.items() if isinstance(x, Tensor)}
    try:
        with (
            parameters_in(model, precision),
            autocast(precision, device.type),
            eager.in_one(tensors),
        ):
            loss_of(model, real, loss_fn)
    finally:
        as_found.put_back()

    try:
        ran = run_without_data(
            model, batch, loss_fn, precision, (), (), False, captured.in_one
        )
    finally:
        as_found.put_back()
    if ran.others:
        raise CaptureError("what forward calls depends on its data")
    return eager, captured


def _first_other(eager: _Lines, captured: _Lines) -> _Other | None:
    """The first call that is not the same."""
    pairs = [*zip(eager.parts[0], captured.parts[0], strict=False)]
    number = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    lines = [calls.lines[number : number + 1] for calls in (eager, captured)]
    if not any(lines):
        return None
    names = [
        _name(calls.parts[0][number]) if own else "nothing more"
        for calls, own in zip((eager, captured), lines, strict=True)
    ]
    one, two = names
    text = f": it calls {one} there, {two} while it is captured"
    if one == two:
        text = f": it calls {one} there with other arguments than while it is captured"
    return _Other(text, (lines[0] or lines[1])[0])


def _name(call: Call) -> str:
    func = call[0]
    return getattr(func, "__name__", None) or str(func)


def _few_tokens(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The first samples of a batch, and of these the first tokens: dims as long as the
    first field's first two are shortened alike."""
    fields = [x for x in batch.values() if isinstance(x, Tensor) and x.ndim > 1]
    samples, tokens = fields[0].shape[:2] if fields else (0, 0)
    few = dict(batch)
    for name, x in batch.items():
        if not isinstance(x, Tensor):
            continue
        for dim, size in enumerate(x.shape):
            if dim == 0 and size == samples:
                few[name] = few[name].narrow(dim, 0, min(size, SAMPLES))
            elif size == tokens:
                few[name] = few[name].narrow(dim, 0, min(size, TOKENS))
    return few
