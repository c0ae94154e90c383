"""verify: run all ranks of a program in this process, and compare with the model.

Loss and every gradient, on the same batch, against the untouched model on one device:
with drawn weights and a drawn batch, as initial ones hide faults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from typing import Any

from torch import Tensor, nn

from autopar.proof.expected import TOLERANCE, Expected, Gradients, expect, unmoved
from autopar.proof.ranks import (
    NOISE,
    FoundStep,
    GivenStep,
    VerificationFailed,
    assemble,
    local_parameters,
    relative_error,
    root_mean_square,
    run_all_ranks,
    run_steps,
)
from autopar.runtime.choices import Choices
from autopar.runtime.match import check_model
from passes.plan import SPLIT
from passes.program import Program
from passes.schedule.check_schedule import check

__all__ = [
    "TOLERANCE",
    "Expected",
    "Verification",
    "VerificationFailed",
    "assemble",
    "expect",
    "find_errors",
    "local_parameters",
    "prove",
    "relative_error",
    "room_needed",
    "run_all_ranks",
    "verify",
]

# Where the model itself, under autocast on one device, is further from its own
# precision than the tolerance, these multiples of its distance are allowed: as two
# roundings of one value, each can be as far off, and in opposite directions.
APART, AWAY = 3.0, 2.0
# The name of the margin by which routers preferred others than they were told.
CHOICES = "choice of experts"
# And of the norm of all gradients, and of the loss without dropout.
NORM, EVALUATED = "norm of all gradients", "loss without dropout"
CLIPPING = "norm that gradients are clipped by"


@dataclass(frozen=True)
class Verification:
    """errors: "loss" or parameter -> norm of the difference over norm of the reference
    (see `NOISE`); in mixed precision the reference is the model under autocast.

    loss, reference_loss: of the same batch. tolerance: what rounding explains.
    away, reference_away: in mixed precision, how far the program and the reference are
    from the model in its own precision; else empty. rerouted: the share of rows that
    took experts which the model chose, where they preferred others. drawn: what was
    drawn for the comparison; the rest was taken as given. unmoved: parameters whose
    gradient is 0 in the model itself, with which little is compared. restored: how many
    tensors of all ranks came back from a checkpoint, bitwise.
    """

    loss: float
    reference_loss: float
    errors: Mapping[str, float]
    tolerance: float
    away: Mapping[str, float] = field(default_factory=dict)
    reference_away: Mapping[str, float] = field(default_factory=dict)
    rerouted: float = 0.0
    drawn: tuple[str, ...] = ()
    unmoved: tuple[str, ...] = ()
    restored: int = 0

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

    def worse(self, other: Verification) -> Verification:
        """Of two steps, by name, where the program is further off; and this loss."""
        worse = [
            name
            for name in other.errors
            if name not in self.errors or other.excess(name) > self.excess(name)
        ]

        def join(
            mine: Mapping[str, float], others: Mapping[str, float]
        ) -> dict[str, float]:
            return {**mine, **{n: others[n] for n in worse if n in others}}

        return replace(
            self,
            errors=join(self.errors, other.errors),
            tolerance=max(self.tolerance, other.tolerance),
            away=join(self.away, other.away),
            reference_away=join(self.reference_away, other.reference_away),
            rerouted=max(self.rerouted, other.rerouted),
            restored=self.restored + other.restored,
        )

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
    """Compare all ranks with the model. The model needs real weights.

    drawn: two steps with weights and batches drawn from the seed (see
    `autopar.proof.draw_values`), in place of the model's own, which stay as they are.
    Where the untouched model cannot run on a drawn batch, or gives no finite numbers,
    the batch is taken as given, and then the weights too. Else one step as given.

    A plan in mixed precision is compared with the model under autocast, and both with
    the model as it is. All three take the choices of the model under autocast: a router
    that rounds otherwise may prefer other experts, and is right to. By how much they
    preferred others must be explained by rounding too.
    """
    check_model(program, model)
    expected = expect(program, model, batch, loss_fn, seed, tolerance, drawn)
    return prove(program, dict(model.named_buffers()), expected, seed)


def prove(
    program: Program,
    buffers: Mapping[str, Tensor],
    expected: Sequence[Expected],
    seed: int = 0,
) -> Verification:
    """Run all ranks beside what the model computed; the worst of all steps, by name.

    Raises VerificationFailed, CommError, ScheduleError.
    """
    check(program.schedule)
    told = [None if e.made is None else Choices(e.made) for e in expected]
    steps = [
        GivenStep(e.weights, e.batch, choices, e.update)
        for e, choices in zip(expected, told, strict=True)
    ]
    buffers = {**buffers, **expected[0].buffers}
    evaluate = all(e.evaluated is not None for e in expected)
    made = run_steps(program, buffers, steps, seed, evaluate)
    compared = map(_compare, made, expected, told)
    worst = reduce(Verification.worse, compared)
    return replace(worst, unmoved=unmoved(expected))


def _compare(made: FoundStep, expected: Expected, told: Choices | None) -> Verification:
    """One step of all ranks, beside the model's."""
    found, want = (made.loss, made.gradients), expected.found
    ours, theirs = made.loss.item(), want[0].item()
    errors = find_errors(found, want)
    errors[NORM] = _error_of_norm(made.norm, want)
    if made.evaluated is not None and expected.evaluated is not None:
        errors[EVALUATED] = relative_error(made.evaluated, expected.evaluated)
    if expected.update is not None:
        errors[CLIPPING] = _apart(made.updated[0].norm, expected.update.norm)
        for rank in made.updated:
            for name, error in rank.errors.items():
                after = f"{name} after an update"
                errors[after] = max(error, errors.get(after, 0.0))
    restored = sum(rank.restored for rank in made.updated)
    proof = Verification(
        ours,
        theirs,
        errors,
        expected.tolerance,
        drawn=expected.drawn,
        restored=restored,
    )
    if told is None or expected.exact is None:
        return proof
    exact = expected.exact
    away, reference_away = find_errors(found, exact), find_errors(want, exact)
    away[NORM] = _error_of_norm(made.norm, exact)
    reference_away[NORM] = _error_of_norm(norm_of(want[1]), exact)
    if told.found:
        errors[CHOICES] = away[CHOICES] = told.margin
        reference_away[CHOICES] = expected.margin
    return replace(proof, away=away, reference_away=reference_away, rerouted=told.share)


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """The 2-norm of all."""
    return sum(g.double().square().sum().item() for g in gradients.values()) ** 0.5


def _error_of_norm(norm: float, want: Gradients) -> float:
    return _apart(norm, norm_of(want[1]))


def _apart(found: float, known: float) -> float:
    """Relative."""
    return abs(found - known) / known if known else abs(found)


def room_needed(program: Program) -> int:
    """Bytes that the model's own forward, of the whole batch on one device, keeps for
    its backward, at least."""
    plan = program.plan
    ranks = [n for axis, n in plan.mesh.axes if "batch" in SPLIT.get(axis, ())]
    microbatches = plan.microbatches * prod(ranks)
    # At least: a rank's microbatch is split by other axes too, and recomputed.
    return microbatches * sum(stage.footprint.saved for stage in program.stages)


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
