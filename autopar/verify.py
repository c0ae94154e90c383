"""verify: run all ranks of a program in this process, and compare with the model.

Loss and every gradient, on the same batch, against the untouched model on one device:
with drawn weights and a drawn batch, as initial ones hide faults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import repeat
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from autopar.proof.again import DRAWS, default_dtype
from autopar.proof.differences import (
    CHOICES,
    CLIPPING,
    EVALUATED,
    NORM,
    differences,
    find_errors,
    update_errors,
    update_room,
)
from autopar.proof.drawn import is_finite
from autopar.proof.expected import TOLERANCE, Expected, expect, unmoved
from autopar.proof.in_double import program_in_double, tree_in_double
from autopar.proof.ranks import (
    FoundStep,
    GivenStep,
    VerificationFailed,
    assemble,
    local_parameters,
    relative_error,
    run_all_ranks,
    run_steps,
)
from autopar.proof.verification import APART, AWAY, Verification
from autopar.runtime.agreement.validate import check_model
from autopar.runtime.comm.routing_replay import RoutingReplay
from autopar.runtime.execute.inductor import Kept
from passes.errors import AutoparError
from passes.plan import SPLIT
from passes.program import Program
from passes.schedule.check_schedule import check

__all__ = [
    "APART",
    "AWAY",
    "CHOICES",
    "CLIPPING",
    "EVALUATED",
    "NORM",
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


def verify(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    drawn: bool = True,
    compiled: Kept | None = None,
) -> Verification:
    """Compare all ranks with the model. The model needs real weights.

    drawn: two steps with weights and batches drawn from the seed (see
    `autopar.proof.draw_values`), in place of the model's own, which stay as they are.
    Where the untouched model cannot run on a drawn batch, or gives no finite numbers,
    the batch is taken as given, and then the weights too. Else one step as given.

    compiled: where functions that Inductor compiled are kept; None: they run as they
    are written.

    A plan in mixed precision is compared with the model under autocast, and both with
    the model as it is. All three take the choices of the model under autocast: a router
    that rounds otherwise may prefer other experts, and is right to. By how much they
    preferred others must be explained by rounding too.
    """
    check_model(program, model)
    expected = expect(program, model, batch, loss_fn, seed, tolerance, drawn)
    return prove(program, dict(model.named_buffers()), expected, seed, compiled)


def prove(
    program: Program,
    buffers: Mapping[str, Tensor],
    expected: Sequence[Expected],
    seed: int = 0,
    compiled: Kept | None = None,
) -> Verification:
    """Run all ranks beside what the model computed; the worst of all steps, by name.

    If that is more than the tolerance explains, both run in float64 as well, where a
    fault stays and rounding does not. And of the precision that they have, no more is
    excused than what the model's own results move by when its ops round otherwise.

    Raises VerificationFailed, CommError, ScheduleError.
    """
    check(program.schedule)
    buffers = {**buffers, **expected[0].buffers}
    told = [None if e.exact is None else RoutingReplay(e.made) for e in expected]
    found = _run(program, buffers, expected, told, seed, compiled)
    proof = reduce(Verification.worse, map(_compare, found, expected, told))
    proof = replace(proof, unmoved=unmoved(expected))
    if proof.passed:
        return proof
    return _look_again(program, buffers, expected, proof, seed, compiled)


def _run(
    program: Program,
    buffers: Mapping[str, Tensor],
    expected: Sequence[Expected],
    told: Sequence[RoutingReplay | None],
    seed: int,
    compiled: Kept | None,
) -> list[FoundStep]:
    steps = [
        GivenStep(e.weights, e.batch, replay, e.update)
        for e, replay in zip(expected, told, strict=True)
    ]
    evaluate = all(e.found.evaluated is not None for e in expected)
    return run_steps(program, buffers, steps, seed, evaluate, compiled)


def _compare(
    found: FoundStep, expected: Expected, told: RoutingReplay | None
) -> Verification:
    """One step of all ranks, beside the model's."""
    want, exact = expected.found, expected.exact
    proof = Verification(
        found.loss.item(),
        want.loss.item(),
        {**differences(found, want), **update_errors(found, expected.update)},
        expected.tolerance,
        drawn=expected.drawn,
        restored=sum(rank.restored for rank in found.updated),
    )
    if told is None or exact is None:
        return proof
    away, reference_away = differences(found, exact), differences(want, exact)
    if found.margin is not None:
        away[CHOICES], reference_away[CHOICES] = found.margin, exact.margin or 0.0
    return replace(proof, away=away, reference_away=reference_away, rerouted=told.share)


# --- rounding or a fault? -----------------------------------------------------------


def _look_again(
    program: Program,
    buffers: Mapping[str, Tensor],
    expected: Sequence[Expected],
    proof: Verification,
    seed: int,
    compiled: Kept | None,
) -> Verification:
    """The proof, with all in float64; and if that is right, beside what rounding does
    to the model. All runs take the choices of its first."""
    told = [RoutingReplay(e.made) for e in expected]
    try:
        with default_dtype(torch.float64):
            double = program_in_double(program)
            wide = [_in_double(e) for e in expected]
            wide_buffers = tree_in_double(dict(buffers))
            found = _run(double, wide_buffers, wide, told, seed, compiled)
        in_double = reduce(Verification.worse, map(_compare_in_double, found, wide))
        proof = replace(proof, in_double=in_double)
        if not in_double.passed:
            return proof
        told = [RoutingReplay(e.made) for e in expected]
        found = _run(program, buffers, expected, told, seed, compiled)
        for draws in DRAWS:
            each = map(_compare_rounded, found, expected, told, repeat(draws))
            rounded = reduce(Verification.worse, each)
            if rounded.passed:
                break
    except VerificationFailed:
        raise
    except (AutoparError, IndexError, RuntimeError, TypeError, ValueError) as error:
        return replace(proof, untold=(str(error).splitlines() or [""])[0])
    return replace(rounded, in_double=in_double, unmoved=proof.unmoved)


def _in_double(expected: Expected) -> Expected:
    """Raises ValueError if the model gives no finite numbers there."""
    exact = expected.again.exact
    if not is_finite(exact.loss, exact.gradients):
        raise ValueError("the model gives no finite numbers")
    return replace(
        expected,
        weights=tree_in_double(dict(expected.weights)),
        batch=tree_in_double(dict(expected.batch)),
        found=exact,
        tolerance=TOLERANCE[torch.float64],
    )


def _compare_in_double(found: FoundStep, wide: Expected) -> Verification:
    moved = wide.again.scatter(double=True)
    room = {**moved, **update_room(moved, wide.found, wide.update)}
    return replace(_compare(found, wide, None), reference_away=room)


def _compare_rounded(
    found: FoundStep, expected: Expected, told: RoutingReplay, draws: int
) -> Verification:
    proof = _compare(found, replace(expected, exact=expected.again.exact), told)
    moved = expected.again.scatter(double=False, draws=draws)
    known = proof.reference_away
    room = {name: max(error, moved.get(name, 0.0)) for name, error in known.items()}
    room |= update_room(room, expected.again.exact, expected.update)
    return replace(proof, reference_away=room)


def room_needed(program: Program) -> int:
    """Bytes that the model's own forward, of the whole batch on one device, keeps for
    its backward, at least."""
    plan = program.plan
    ranks = [n for axis, n in plan.mesh.axes if "batch" in SPLIT.get(axis, ())]
    microbatches = plan.microbatches * prod(ranks)
    # At least: a rank's microbatch is split by other axes too, and recomputed.
    return microbatches * sum(stage.footprint.saved for stage in program.stages)
