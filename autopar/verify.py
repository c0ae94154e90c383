"""verify: run all ranks of a program in this process, and compare with the model.

Loss and every gradient, on the same batch, against the untouched model on one device:
with drawn weights and a drawn batch, as initial ones hide faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.proof.drawn import drawn_batch, drawn_weights, is_finite
from autopar.runtime.choices import Choices, Choosing
from autopar.runtime.comm import Comm
from autopar.runtime.executor import Executor
from autopar.runtime.match import check_model
from autopar.runtime.shards import owns, put_shard, take_shard
from autopar.runtime.virtual import run_virtual
from autopar.training.reference import reference_step
from passes.errors import AutoparError
from passes.plan import SPLIT
from passes.program import Program

# Relative error that rounding explains, by dtype of the parameters.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
# The same for what is computed in mixed precision: so many roundings of its dtype
# (0.03 for bfloat16, 0.004 for float16). Where the model itself, under autocast on one
# device, is further than that from its own precision, these multiples of its distance:
# as two roundings of one value, each can be as far off, and in opposite directions.
ROUNDINGS = 4
APART, AWAY = 3.0, 2.0
# The name of the margin by which routers preferred others than they were told.
CHOICES = "choice of experts"
# A gradient this small, as a share of the model's typical one, is compared as if it
# were this large: a key's bias has none at all, as softmax does not see what it adds,
# and what is computed for it is rounding.
NOISE = 0.1


# A loss, and gradients by the model's own names.
Gradients = tuple[Tensor, Mapping[str, Tensor]]


class VerificationFailed(AutoparError):
    """The program does not compute what the model computes."""


@dataclass(frozen=True)
class Verification:
    """errors: "loss" or parameter -> norm of the difference over norm of the reference
    (see `NOISE`); in mixed precision the reference is the model under autocast.

    loss, reference_loss: of the same batch. tolerance: what rounding explains.
    away, reference_away: in mixed precision, how far the program and the reference are
    from the model in its own precision; else empty. rerouted: the share of rows that
    took experts which the model chose, where they preferred others. drawn: what was
    drawn for the comparison; the rest was taken as given.
    """

    loss: float
    reference_loss: float
    errors: Mapping[str, float]
    tolerance: float
    away: Mapping[str, float] = field(default_factory=dict)
    reference_away: Mapping[str, float] = field(default_factory=dict)
    rerouted: float = 0.0
    drawn: tuple[str, ...] = ()

    def limits(self, name: str) -> tuple[float, float]:
        """What an error and a distance from the model's own precision may be."""
        known = self.reference_away.get(name, 0.0)
        return max(self.tolerance, APART * known), max(self.tolerance, AWAY * known)

    def excess(self, name: str) -> float:
        """The greater of the two over its limit: more than 1 fails."""
        apart, away = self.limits(name)
        if not apart:
            return float("inf") if self.errors[name] else 0.0
        return max(self.errors[name] / apart, self.away.get(name, 0.0) / away)

    @property
    def worst(self) -> tuple[str, float]:
        name = max(self.errors, key=self.excess)
        return name, self.errors[name]

    @property
    def passed(self) -> bool:
        return all(self.excess(name) <= 1.0 for name in self.errors)

    def check(self) -> Verification:
        """Raises VerificationFailed that names the worst parameter."""
        if not self.passed:
            name, error = self.worst
            raise VerificationFailed(
                f"'{name}' differs from the untouched model by {error:.1e}, more than "
                f"rounding explains ({self.limits(name)[0]:.0e})",
                fix="report this model and mesh; another mesh may be right meanwhile",
            )
        return self


def verify(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    drawn: bool = True,
) -> Verification:
    """Compare one step of all ranks with the model. The model needs real weights.

    drawn: with weights and a batch drawn from the seed (see
    `autopar.proof.draw_values`), in place of the model's own, which stay as they are.
    Where the untouched model cannot run on a drawn batch, or gives no finite numbers,
    the batch is taken as given, and then the weights too.

    A plan in mixed precision is compared with the model under autocast, and both with
    the model as it is. All three take the choices of the model under autocast: a router
    that rounds otherwise may prefer other experts, and is right to. By how much they
    preferred others must be explained by rounding too.
    """
    check_model(program, model)
    for what in ((WEIGHTS, BATCH), (WEIGHTS,)) if drawn else ():
        given = drawn_batch(program, batch, seed) if BATCH in what else batch
        with drawn_weights(model, seed):
            made = _reference(program, model, given, loss_fn, seed, tolerance, what)
            if made is not None:
                return _compare(program, model, given, loss_fn, seed, made, what)
    made = _reference(program, model, batch, loss_fn, seed, tolerance, ())
    assert made is not None, "what is given is compared as it is"
    return _compare(program, model, batch, loss_fn, seed, made, ())


# What may be drawn.
WEIGHTS, BATCH = "weights", "batch"


@dataclass(frozen=True)
class _Reference:
    """What the model computes; of mixed precision, with the choices of its routers."""

    found: Gradients
    routers: Choosing | None
    tolerance: float


def _reference(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
    seed: int,
    tolerance: float | None,
    drawn: tuple[str, ...],
) -> _Reference | None:
    """One step of the model; None if it cannot take what was drawn for it."""
    precision = program.plan.dtype
    routers = Choosing() if precision else None
    try:
        with _Narrowest() as seen:
            want = reference_step(model, batch, loss_fn, seed << 32, precision, routers)
    except (AssertionError, IndexError, RuntimeError, ValueError):
        if not drawn:
            raise
        return None
    if drawn and not is_finite(*want):
        return None
    if tolerance is None:
        tolerance = rounding(model, precision, seen.dtype)
    return _Reference(want, routers, tolerance)


def _compare(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
    seed: int,
    reference: _Reference,
    drawn: tuple[str, ...],
) -> Verification:
    """One step of all ranks, beside the model's."""
    want, routers, tolerance = reference.found, reference.routers, reference.tolerance
    theirs = want[0].item()
    if routers is None:
        found = run_all_ranks(program, model, batch, seed)
        errors, ours = find_errors(found, want), found[0].item()
        return Verification(ours, theirs, errors, tolerance, drawn=drawn)
    told, exactly = Choices(routers.made), Choices(routers.made)
    found = run_all_ranks(program, model, batch, seed, told)
    choosing = Choosing(exactly)
    exact = reference_step(model, batch, loss_fn, seed << 32, choosing=choosing)
    errors, away = find_errors(found, want), find_errors(found, exact)
    reference_away = find_errors(want, exact)
    if told.found:
        errors[CHOICES] = away[CHOICES] = told.margin
        reference_away[CHOICES] = exactly.margin
    return Verification(
        found[0].item(), theirs, errors, tolerance, away, reference_away,
        told.share, drawn,
    )  # fmt: skip


def check_room(program: Program, memory: float) -> None:
    """Raises VerificationFailed where the model's own forward, of the whole batch on
    one device, keeps more than so many bytes for its backward."""
    plan = program.plan
    ranks = [n for axis, n in plan.mesh.axes if "batch" in SPLIT.get(axis, ())]
    microbatches = plan.microbatches * prod(ranks)
    # At least: a rank's microbatch is split by other axes too, and recomputed.
    least = microbatches * sum(stage.footprint.saved for stage in program.stages)
    if least > memory:
        raise VerificationFailed(
            f"to compare with, the model runs the whole batch of "
            f"{program.batch_extent} samples on one device, and keeps "
            f"{least / 2**30:.0f} GiB at least: there are {memory / 2**30:.0f} GiB",
            fix="verify the same plan of a smaller batch, or of fewer layers",
        )


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


def find_errors(found: Gradients, want: Gradients) -> dict[str, float]:
    """By name, of the loss and of every gradient; 1 for one that should be there."""
    loss, grads = found
    noise = NOISE * root_mean_square(want[1].values())
    errors = {"loss": relative_error(loss, want[0])}
    for name, grad in want[1].items():
        if name in grads:
            least = noise * grad.numel() ** 0.5
            errors[name] = relative_error(grads[name], grad, least)
        elif bool(grad.any()):
            errors[name] = 1.0
    return errors


def root_mean_square(tensors: Iterable[Tensor]) -> float:
    """Over the elements of all tensors."""
    found = [(x.double().square().sum().item(), x.numel()) for x in tensors]
    count = sum(n for _, n in found)
    return (sum(squares for squares, _ in found) / max(count, 1)) ** 0.5


def relative_error(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """|got - want| / max(|want|, least), the norms in double precision."""
    scale = max(want.double().norm().item(), least)
    difference = (got.double() - want.double()).norm().item()
    return difference / scale if scale else difference


def run_all_ranks(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    seed: int = 0,
    choices: Choices | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One step on the virtual mesh: the loss, and whole gradients by name.

    choices: what routers are told to choose.
    Raises VerificationFailed when ranks that should agree do not.
    """
    wholes = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor)}

    def body(comm: Comm) -> tuple[Tensor, dict[str, Tensor]]:
        held = local_parameters(program, comm, wholes)
        comm.choices = choices
        executor = Executor(program, comm, held, buffers, seed)
        loss, scale = executor.step(tensors), executor.loss_scale
        while scale and scale.good == 0 and scale.scale > 1.0:
            executor.steps = 0  # once more, with the same dropout masks
            loss = executor.step(tensors)
        return loss, executor.grads

    results = run_virtual(program.mesh, program.plan.microbatches, body)
    losses = {loss.item() for loss, _ in results}
    if len(losses) != 1 and not all(x != x for x in losses):
        raise VerificationFailed(f"ranks do not agree on the loss: {sorted(losses)}")
    noise = NOISE * root_mean_square(g for _, grads in results for g in grads.values())
    whole: dict[str, Tensor] = {}
    for name, spec in program.parameters.items():
        if spec.trainable and spec.stages:
            shards = [grads.get(name) for _, grads in results]
            whole[name] = assemble(program, name, shards, noise)
    return results[0][0], whole


def local_parameters(
    program: Program, comm: Comm, wholes: Mapping[str, Tensor]
) -> dict[str, nn.Parameter]:
    """The rank's shards of the parameters that its stages hold."""
    mine = program.stages_of(comm.rank)
    return {
        name: nn.Parameter(
            take_shard(wholes[name].detach(), spec, program.mesh, comm.coords),
            requires_grad=spec.trainable,
        )
        for name, spec in program.parameters.items()
        if set(spec.stages) & set(mine)
    }


def assemble(
    program: Program, name: str, shards: list[Tensor | None], noise: float
) -> Tensor:
    """The whole tensor from the shards of all ranks; replicas must agree, as far as
    elements are above the noise."""
    spec, mesh = program.parameters[name], program.mesh
    first = next(s for s in shards if s is not None)
    whole = torch.full(spec.shape, float("nan"), dtype=first.dtype)
    held_by = tuple(program.schedule.stage_to_rank[s] for s in spec.stages)
    for rank, shard in enumerate(shards):
        if shard is not None and owns(spec, mesh, mesh.coords(rank), held_by):
            put_shard(whole, shard, spec, mesh, mesh.coords(rank))
    for rank, shard in enumerate(shards):
        if shard is None:
            continue
        mine = take_shard(whole, spec, mesh, mesh.coords(rank))
        if relative_error(shard, mine, noise * mine.numel() ** 0.5) > 1e-6:
            raise VerificationFailed(
                f"rank {rank} has another gradient of '{name}' than its replicas"
            )
    return whole
