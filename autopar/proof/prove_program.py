"""prove_program: a plan of any size, shown to compute what the model computes.

A program that is small enough is run on all its ranks in this process, beside the
captured graph. Of a larger one everything is made small (`autopar.proof.small`): the
same passes compile it for a small mesh, that is run, and the large program must be the
small one but for its numbers (`passes.proof.transfer`), and run without numbers
(`autopar.proof.full_size`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.own_modes import on_cpu
from autopar.passes.errors import AutoparError
from autopar.passes.layers import number_in
from autopar.passes.mesh import TIME
from autopar.passes.program import Program
from autopar.passes.proof.same_specs import find_other_spec
from autopar.passes.proof.shrink_plan import ChosenLayers, StageLayers
from autopar.passes.proof.transfer import Difference, Sizes, differs
from autopar.passes.proof_record import SMALL, WHOLE, Proof
from autopar.passes.traced import Traced
from autopar.progress import tell
from autopar.proof.beside_model import (
    LITTLE,
    MANY,
    TOLERANCE,
    Untouched,
    run_beside_model,
)
from autopar.proof.chosen_layers import KEPT, all_layers, find_chosen_layers
from autopar.proof.differences import result_of_model
from autopar.proof.expected import Expected
from autopar.proof.full_size import check_full_size
from autopar.proof.in_double import program_in_double, tree_in_double
from autopar.proof.interpret import run_graph
from autopar.proof.ranks import StepResult, VerificationFailed
from autopar.proof.reference_runs import Arithmetic, ReferenceRuns, default_dtype
from autopar.proof.run_beside import prove as run_beside
from autopar.proof.small import Runnable, make_small, whole
from autopar.proof.update import update_whole
from autopar.proof.values import STEPS, draw_values, values_of_buffers
from autopar.proof.verification import Verification
from autopar.runtime.comm.comm import CommError

# What is run as it is: LITTLE floating point operations of a forward, of all ranks, of
# which there are not many, and MANY parameters. And what is, if it cannot be made
# small: MUCH, and parameters of all replicas, each of which takes 100 bytes in float64.
RANKS, MUCH, HELD = 16, 1e11, 1e8

WITHOUT = (
    "compile a smaller model of the kind, verify that, and this one with prove=False "
    "(--unproved)"
)


class NotProved(AutoparError):
    """A program that is neither small enough to run nor like a small one."""


@on_cpu()
def prove_program(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    traced: Traced,
    loss_fn: Callable[..., Any] | None = None,
    seed: int = 0,
) -> Proof:
    """Prove that a program computes what its captured model does, and that this is what
    the model itself does, see `run_beside_model`.

    Two steps are compared, with drawn weights and batches: losses, every gradient, what
    else the model returns, what replicas hold, the norm of all gradients, the loss
    without dropout, and the weights after gradients were clipped and AdamW updated
    them; a checkpoint must come back.
    Raises VerificationFailed where it does not, NotProved where that cannot be told.
    """
    untouched = Untouched(model, batch, loss_fn, program.plan.lowering)
    beside = run_beside_model(untouched, traced, program.forward_flops, seed)
    proof = _prove(Claim(program, traced, untouched, seed))
    return replace(proof, model=beside)


@dataclass(frozen=True)
class Claim:
    """The claim that a program computes what was captured of a model. seed: of the
    values that it is tested on."""

    program: Program
    traced: Traced
    untouched: Untouched
    seed: int


def _prove(claim: Claim) -> Proof:
    flops, count = claim.program.forward_flops, claim.untouched.parameters
    mesh = claim.program.mesh
    if flops <= LITTLE and count <= MANY and mesh.size <= RANKS:
        return _prove_whole(claim)
    tried: set[ChosenLayers] = set()
    for layers in _choices(claim):
        if layers in tried:
            continue
        tried.add(layers)
        try:
            return _prove_small(claim, layers)
        except VerificationFailed:
            raise
        except AutoparError as error:
            problem = error
    if flops > MUCH or count * mesh.sample_ranks > HELD:
        raise NotProved(
            f"the plan could not be proved: {problem.message}",
            source=problem.source,
            fix=WITHOUT,
        ) from problem
    return _prove_whole(claim)


def _choices(claim: Claim) -> Iterator[ChosenLayers]:
    """The layers that a proof is tried with, one choice after the other."""
    model, program = claim.untouched.model, claim.program
    yield find_chosen_layers(model, program)
    # A loop that begins and ends within a pattern has fewer repeats than are kept.
    yield find_chosen_layers(model, program, KEPT + 1)
    # Where what a certain layer gives is read elsewhere, none may be left out.
    yield all_layers(program)


def _prove_whole(claim: Claim) -> Proof:
    runnable = whole(claim.program, claim.untouched.model, claim.traced)
    return _proof(WHOLE, runnable, claim)


def _prove_small(claim: Claim, layers: ChosenLayers) -> Proof:
    program, untouched = claim.program, claim.untouched
    tell("proof: compiling it with small sizes")
    small = make_small(
        program,
        untouched.model,
        untouched.batch,
        untouched.loss_fn,
        claim.traced,
        layers,
    )
    tell("proof: comparing texts")
    check_transfer(program, small)
    tell("proof: ranks of full size, without numbers")
    cut_short = check_full_size(program, claim.traced)
    proof = _proof(SMALL, small, claim)
    numbers = {
        number_in(small.few.path, name)
        for stage in program.stages
        for name in stage.layers
    } - {None}
    return replace(
        proof,
        sizes={str(large): n for large, n in small.sizes.items() if large.size != n},
        layers=(len(small.few.order), len(numbers)),
        texts=len(program.modules),
        cut_short=cut_short,
    )


# --- running it ------------------------------------------------------------


def _proof(size: str, runnable: Runnable, claim: Claim) -> Proof:
    """Proves a claim by running its program, or a small one made from it."""
    result = run(runnable, claim.untouched.batch, claim.seed)
    program = runnable.program
    worst = result.worst[0]
    proof = Proof(
        size=size,
        mesh=str(program.mesh),
        microbatches=program.plan.microbatches,
        ranks=program.mesh.size,
        loss=result.loss,
        reference_loss=result.reference_loss,
        worst=worst,
        error=result.excess(worst) * TOLERANCE,
        tolerance=TOLERANCE,
        compared=len(result.errors),
        restored=result.restored,
    )
    result.check()
    return proof


def run(runnable: Runnable, batch: Mapping[str, Any], seed: int = 0) -> Verification:
    """All ranks beside the captured graph, in float64.

    batch: an example, of any sizes. Raises VerificationFailed where ranks do not get to
    an end, NotProved where the captured graph does not.
    """
    return run_program(runnable.program, expect(runnable, batch, seed), seed)


def expect(
    runnable: Runnable, batch: Mapping[str, Any], seed: int = 0
) -> list[Expected]:
    """Two steps of the captured graph, in float64. Raises NotProved."""
    tell("proof: the captured model")
    buffers = values_of_buffers(runnable.traced.graph.buffers, runnable.like, seed)
    held = tree_in_double(buffers)
    with default_dtype(torch.float64):
        return [
            replace(_expect(runnable, buffers, batch, seed, number), buffers=held)
            for number in range(STEPS)
        ]


def run_program(
    program: Program, expected: Sequence[Expected], seed: int = 0
) -> Verification:
    """All ranks of a program in float64. Raises VerificationFailed."""
    try:
        with default_dtype(torch.float64):
            return run_beside(program_in_double(program), {}, expected, seed)
    except CommError as error:
        raise VerificationFailed(
            f"ranks do not get to the end of a step: {error}"
        ) from error


def _expect(
    runnable: Runnable,
    buffers: Mapping[str, Tensor],
    batch: Mapping[str, Any],
    seed: int,
    number: int,
) -> Expected:
    """Computes the captured graph on drawn values."""
    traced, key = runnable.traced, (seed << 32) + number
    problem = "it gives no finite numbers"
    drawn = draw_values(traced, runnable.like, batch, seed + number, not runnable.sizes)
    for weights, inputs in drawn:
        values = {**inputs, **weights, **buffers, **traced.literals}
        try:
            results = run_graph(traced, values, key)
        except (IndexError, RuntimeError, ValueError) as error:
            problem = str(error).partition("\n")[0]
            continue
        if not all(
            bool(x.isfinite().all()) for x in (results[0], *results[1].values())
        ):
            continue
        own, update = tree_in_double(weights), None
        if number == STEPS - 1:
            trained = {
                spec.part.source
                for spec in runnable.program.parameters.values()
                if spec.trainable and spec.stages
            }
            update = update_whole(
                own, {n: g for n, g in results[1].items() if n in trained}
            )
        return Expected(
            own,
            tree_in_double(inputs),
            result_of_model(
                *results[:2], _evaluated(runnable, values), outputs=results[2]
            ),
            TOLERANCE,
            ReferenceRuns(partial(_run_reference, runnable, values, key)),
            update=update,
        )
    raise NotProved(
        f"the captured model does not run on drawn weights: {problem}", fix=WITHOUT
    )


def _evaluated(runnable: Runnable, values: Mapping[str, Tensor]) -> Tensor | None:
    if runnable.program.draw or not runnable.program.has_dropout:
        return None
    return run_graph(runnable.traced, values, None)[0]


def _run_reference(
    runnable: Runnable, values: Mapping[str, Tensor], key: int, arithmetic: Arithmetic
) -> StepResult:
    """Runs the captured graph for `ReferenceRuns`: in float64, whatever is asked."""
    with arithmetic:
        results = run_graph(runnable.traced, values, key)
        evaluated = _evaluated(runnable, values)
        return result_of_model(*results[:2], evaluated, outputs=results[2])


# --- what it stands for -------------------------------------------------------


def check_transfer(program: Program, small: Runnable) -> None:
    """Raises NotProved where the program is not the small one but for numbers."""
    few = small.few
    inside = min(1, len(few.stages) - 1)
    plans = program.plan, small.program.plan
    names = (TIME, *(axis for axis, _ in program.mesh.axes))
    axes = [(plans[0].size(a), plans[1].size(a)) for a in names]
    sizes = Sizes.of(small.sizes, axes, small.positions)
    known: dict[tuple[str, str, StageLayers], Difference | None] = {}
    for number, stage in enumerate(program.stages):
        place = few.stages.index(number) if number in few.stages else None
        stands = [place] if place is not None else range(inside, len(few.stages) - 1)
        numbers = (number_in(few.path, name) for name in stage.layers)
        own = {n for n in numbers if n is not None}
        texts = {
            (key, few.layers(i, own))
            for i in stands
            for key in small.program.stages[i].modules.values()
        }
        for key in set(stage.modules.values()):
            difference = None
            for other, layers in sorted(texts, key=str):
                if (key, other, layers) not in known:
                    known[key, other, layers] = differs(
                        program.modules[key],
                        small.program.modules[other],
                        sizes,
                        layers,
                    )
                difference = known[key, other, layers]
                if difference is None:
                    break
            if difference is not None or not texts:
                raise NotProved(
                    f"stage {number} is not what it is with small sizes, {difference}"
                )
    odd = find_other_spec(program, small.program, small.sizes, small.factors)
    if odd is not None:
        raise NotProved(f"'{odd}' does not rest as it does with small sizes")
