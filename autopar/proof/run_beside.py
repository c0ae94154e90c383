"""All ranks of a program, run in this process beside what a model computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import repeat

import torch
from torch import Tensor

from autopar.passes.errors import AutoparError
from autopar.passes.program import Program
from autopar.passes.schedule.check_schedule import check
from autopar.progress import tell
from autopar.proof.differences import (
    CHOICES,
    differences,
    update_allowance,
    update_errors,
)
from autopar.proof.drawn import is_finite
from autopar.proof.expected import TOLERANCE, Expected, unmoved
from autopar.proof.in_double import program_in_double, tree_in_double
from autopar.proof.ranks import StepInputs, StepResult, VerificationFailed, run_steps
from autopar.proof.reference_runs import DRAWS, default_dtype
from autopar.proof.verification import Verification
from autopar.runtime.comm.routing_replay import RoutingReplay
from autopar.runtime.execute.code_cache import CodeCache


def prove(
    program: Program,
    buffers: Mapping[str, Tensor],
    expected: Sequence[Expected],
    seed: int = 0,
    compiled: CodeCache | None = None,
) -> Verification:
    """Run all ranks beside what the model computed; the worst of all steps, by name.

    If that is more than the tolerance explains, both run in float64 as well, where a
    fault stays and rounding does not; and always in mixed precision, whose tolerance
    would hide a small one. And of the precision that they have, no more is excused than
    what the model's own results move by when its ops round otherwise.

    Raises VerificationFailed, CommError, ScheduleError.
    """
    check(program.schedule)
    buffers = {**buffers, **expected[0].buffers}
    told = [None if e.exact is None else RoutingReplay(e.made) for e in expected]
    verified = _run(program, buffers, expected, told, seed, compiled)
    proof = reduce(Verification.worse, map(_compare, verified, expected, told))
    proof = replace(proof, unmoved=unmoved(expected))
    if proof.passed and all(e.exact is None for e in expected):
        return proof
    return _look_again(program, buffers, expected, proof, seed, compiled)


def _run(
    program: Program,
    buffers: Mapping[str, Tensor],
    expected: Sequence[Expected],
    told: Sequence[RoutingReplay | None],
    seed: int,
    compiled: CodeCache | None,
) -> list[StepResult]:
    steps = [
        StepInputs(e.weights, e.batch, replay, e.update, e.masks)
        for e, replay in zip(expected, told, strict=True)
    ]
    evaluate = all(e.result.evaluated is not None for e in expected)
    return run_steps(program, buffers, steps, seed, evaluate, compiled)


def _compare(
    ours: StepResult, expected: Expected, told: RoutingReplay | None
) -> Verification:
    """One step of all ranks, beside the model's."""
    want, exact = expected.result, expected.exact
    proof = Verification(
        ours.loss.item(),
        want.loss.item(),
        {**differences(ours, want, exact), **update_errors(ours, expected.update)},
        expected.tolerance,
        drawn=expected.drawn,
        restored=sum(rank.restored for rank in ours.updated),
    )
    if told is None or exact is None:
        return proof
    away, reference_away = differences(ours, exact), differences(want, exact)
    if ours.margin is not None:
        away[CHOICES], reference_away[CHOICES] = ours.margin, exact.margin or 0.0
    return replace(proof, away=away, reference_away=reference_away, rerouted=told.share)


# --- rounding or a fault? -----------------------------------------------------------


def _look_again(
    program: Program,
    buffers: Mapping[str, Tensor],
    expected: Sequence[Expected],
    proof: Verification,
    seed: int,
    compiled: CodeCache | None,
) -> Verification:
    """The proof, with all in float64; and if that is right, beside what rounding does
    to the model. All runs take the choices of its first."""
    tell("running both in float64")
    told = [RoutingReplay(e.made) for e in expected]
    try:
        with default_dtype(torch.float64):
            double = program_in_double(program)
            wide = [_in_double(e) for e in expected]
            wide_buffers = tree_in_double(dict(buffers))
            verified = _run(double, wide_buffers, wide, told, seed, compiled)
        in_double = reduce(Verification.worse, map(_compare_in_double, verified, wide))
        if proof.passed or not in_double.passed:
            return replace(proof, in_double=in_double)
        told = [RoutingReplay(e.made) for e in expected]
        verified = _run(program, buffers, expected, told, seed, compiled)
        for draws in DRAWS:
            each = map(_compare_rounded, verified, expected, told, repeat(draws))
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
    exact = expected.reference.exact
    if not is_finite(exact.loss, exact.gradients):
        raise ValueError("the model gives no finite numbers")
    return replace(
        expected,
        weights=tree_in_double(dict(expected.weights)),
        batch=tree_in_double(dict(expected.batch)),
        result=exact,
        tolerance=TOLERANCE[torch.float64],
    )


def _compare_in_double(ours: StepResult, wide: Expected) -> Verification:
    proof = _compare(ours, wide, None)
    if proof.passed:  # with nothing more allowed
        return replace(proof, rounded=True)
    moved = wide.reference.scatter(double=True)
    allowed = {**moved, **update_allowance(moved, wide.result, wide.update)}
    return replace(proof, reference_away=allowed, rounded=True)


def _compare_rounded(
    ours: StepResult, expected: Expected, told: RoutingReplay, draws: int
) -> Verification:
    proof = _compare(ours, replace(expected, exact=expected.reference.exact), told)
    moved = expected.reference.scatter(double=False, draws=draws)
    known = proof.reference_away
    allowed = {name: max(error, moved.get(name, 0.0)) for name, error in known.items()}
    allowed |= update_allowance(allowed, expected.reference.exact, expected.update)
    return replace(proof, reference_away=allowed, rounded=True)
