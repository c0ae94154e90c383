"""Programs that are broken on purpose: a proof must notice each that computes anything
else.

There are three ways to prove (`WAYS`): `verify` runs a program beside the model. The
proof of a large one runs a small one beside the captured graph: so a fault that a pass
makes is in both, and the small one's mutants must be noticed there. And a fault of the
large one alone must be noticed as it is compared with the small one.

`python tests/mutants.py` makes mutants of all kinds, over all plans, and prints the
table of what became of them; `python tests/mutants.py 3 7` those of plans 3 to 7.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from cases import Case
from mutant_plans import NOT_ALIKE, PLANS, Planned, compiled, prepared
from mutate_collectives import OF_COLLECTIVES
from mutate_loops import OF_LOOPS
from mutate_programs import OF_PROGRAMS
from mutate_values import OF_VALUES
from statements import Place, places, with_line
from torch import Tensor

import autopar.proof.prove_program as prover
from autopar.passes.mesh import TIME
from autopar.passes.program import Program
from autopar.proof.expected import TOLERANCE, Expected, expect
from autopar.proof.full_size import check_full_size
from autopar.proof.in_double import program_in_double
from autopar.proof.ranks import (
    StepInputs,
    StepResult,
    relative_error,
    root_mean_square,
    run_steps,
)
from autopar.proof.run_beside import prove
from autopar.proof.small import Runnable, make_small, whole
from autopar.proof.verification import Verification
from autopar.reports.tables import Table

EACH = 2  # mutants of each kind, plan and way
ALONE = 0.3  # the chance that one rank alone runs a changed text
SEEDS = (11, 12, 13)  # of draws that tell whether a survivor computes the same
ROUNDED = 1e-6  # the same, in float32
SAME = 1e-12  # relative, in float64: sums in another order; else one rounding


KINDS = {**OF_COLLECTIVES, **OF_VALUES, **OF_LOOPS}  # of text


# --- ways to prove ------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A program, and a way to prove it.

    prove: any program in its place; raises what it notices. run: two steps of any, with
    what is drawn from a seed. same: how far two that compute the same may be apart.
    """

    program: Program
    prove: Callable[[Program], object]
    run: Callable[[Program, int], Sequence[StepResult]]
    same: float = SAME


def by_verify(plan: Planned) -> Subject:
    """Run beside the untouched model."""
    case, original, known = prepared(plan)
    buffers = dict(case.model.named_buffers())
    precision = original.plan.dtype
    same = SAME if precision is None else torch.finfo(precision).eps
    if precision is None and known[0].tolerance > TOLERANCE[torch.float64]:
        same = ROUNDED  # the model has norms in float32

    @lru_cache
    def drawn(seed: int) -> list[StepInputs]:
        return given(expect(original, *case, seed))

    return Subject(
        original,
        lambda program: prove(guarded(program), copied(buffers), own(known)),
        lambda program, seed: run_steps(guarded(program), buffers, drawn(seed), seed),
        same,
    )


def by_small(plan: Planned) -> Subject:
    """Its small program, run beside the captured graph."""
    case, program = compiled(plan)
    small = make_small(program, *case)
    known = prover.expect(small, case.batch)
    return Subject(
        small.program,
        lambda program: prover.run_program(guarded(program), own(known)),
        in_float64(small, case),
    )


def by_transfer(plan: Planned) -> Subject:
    """A large program alone is wrong, and compared with the small one."""
    case, program = compiled(plan, large=plan not in NOT_ALIKE)
    small = make_small(program, *case)

    traced = case.trace(program.plan.lowering)

    def check(program: Program) -> None:
        prover.check_transfer(program, small)
        check_full_size(program, traced)

    runnable = whole(program, case.model, traced)
    return Subject(program, check, in_float64(runnable, case))


WAYS: dict[str, Callable[[Planned], Subject]] = {
    "verify": by_verify,
    "small": by_small,
    "transfer": by_transfer,
}


def in_float64(
    runnable: Runnable, case: Case
) -> Callable[[Program, int], list[StepResult]]:
    @lru_cache
    def drawn(seed: int) -> list[Expected]:
        return prover.expect(runnable, case.batch, seed)

    def run(program: Program, seed: int) -> list[StepResult]:
        program, steps = program_in_double(guarded(program)), drawn(seed)
        return run_steps(program, copied(steps[0].buffers), given(steps), seed)

    return run


def own(expected: Sequence[Expected]) -> list[Expected]:
    """The same, with tensors that a program may write into."""
    return [
        replace(e, batch=copied(e.batch), buffers=copied(e.buffers)) for e in expected
    ]


def given(expected: Sequence[Expected]) -> list[StepInputs]:
    return [StepInputs(e.weights, copied(e.batch)) for e in expected]


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in tensors.items()}


# --- mutants ------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    kind: str
    what: str
    program: Program

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def mutants(plan: Planned, program: Program, each: int = EACH) -> Iterator[Mutant]:
    """Yields so many of each kind, drawn by chance, but always the same."""
    for kind, found in [*_of_text(program), *_of_program(program)]:
        chance = random.Random(f"{plan} {kind}")
        for what, changed in chance.sample(found, min(each, len(found))):
            made = changed() if callable(changed) else changed
            if callable(changed) and chance.random() < ALONE:
                what, made = f"one rank: {what}", on_one_rank(program, made, chance)
            yield Mutant(kind, what, made)


def on_one_rank(program: Program, mutant: Program, chance: random.Random) -> Program:
    """A rank runs the mutant's text, all others the program's."""
    places = [
        (number, coords)
        for number, stage in enumerate(program.stages)
        for coords, key in stage.modules.items()
        if mutant.modules[key] != program.modules[key]
    ]
    number, coords = chance.choice(places)
    stage = program.stages[number]
    key = stage.modules[coords]
    stages = list(program.stages)
    stages[number] = replace(stage, modules={**stage.modules, coords: "mutant"})
    modules = {**program.modules, "mutant": mutant.modules[key]}
    return replace(program, stages=tuple(stages), modules=modules)


def _of_text(program: Program) -> Iterator[tuple[str, list]]:
    sizes = dict(program.mesh.axes)
    if program.plan.microbatches > 1:
        sizes[TIME] = program.plan.microbatches
    known = {
        (place.function, place.line): place
        for text in program.modules.values()
        for place in places(text, sizes)
    }
    for kind, mutate in KINDS.items():
        found = [
            (f"{place.line}  ->  {new}", _with_line(program, place, new))
            for place in known.values()
            for new in mutate(place)
            if new != place.line
        ]
        yield kind, found


def _with_line(
    program: Program, place: Place, new: str | None
) -> Callable[[], Program]:
    """In each module that has the line in this function."""

    def change() -> Program:
        modules = {
            key: with_line(text, place.function, place.line, new)
            for key, text in program.modules.items()
        }
        return replace(program, modules=modules)

    return change


def _of_program(program: Program) -> Iterator[tuple[str, list]]:
    for kind, mutate in OF_PROGRAMS.items():
        yield kind, list(mutate(program))


# Backwards of torch that read beyond their operands where shapes do not fit, and the
# shapes that must: a mutant is to fail and not to end the process.
GUARDS = """

def _layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, mask):
    rows = x.numel() // weight.numel()
    assert dy.shape == x.shape and mean.numel() == rstd.numel() == rows
    assert list(weight.shape) == list(shape) == list(x.shape[-len(shape) :])
    given = (dy, x, shape, mean, rstd, weight, bias, mask)
    return aten.native_layer_norm_backward.default(*given)


def _guarded(call):
    def checked(dy, q, k, v, out, lse, *rest, **named):
        assert dy.shape == out.shape == (*q.shape[:3], v.shape[3])
        assert lse.shape == q.shape[:3] and k.shape[:3] == v.shape[:3]
        return call(dy, q, k, v, out, lse, *rest, **named)

    return checked
"""


def guarded(program: Program) -> Program:
    """The program, with its own checks before what does not check."""

    def change(text: str) -> str:
        text = text.replace(
            "aten.native_layer_norm_backward.default", "_layer_norm_backward"
        )
        for name in ("kernels.attention_backward", "c.attention_backward"):
            text = text.replace(f"{name}(", f"_guarded({name})(")
        return text + GUARDS

    modules = {key: change(text) for key, text in program.modules.items()}
    return replace(program, modules=modules)


# --- what becomes of them -----------------------------------------------------------

KILLED, EQUAL, ALIVE = "killed", "same", "ALIVE"


def fate(subject: Subject, program: Program) -> str:
    """Whether a mutant is noticed; or else computes the same; or not."""
    literals = copied(subject.program.literals)  # its own: it may write into them
    try:
        proof = subject.prove(replace(program, literals=literals))
        if isinstance(proof, Verification):
            proof.check()
    except Exception:
        return KILLED
    return EQUAL if all(_same(subject, program, seed) for seed in SEEDS) else ALIVE


def _same(subject: Subject, mutant: Program, seed: int) -> bool:
    """Whether it computes the same for what is drawn from a seed."""
    original = subject.program
    try:
        mutant = replace(mutant, literals=copied(original.literals))
        one, other = (subject.run(p, seed) for p in (mutant, original))
    except Exception:
        return False
    return all(_equal(a, b, subject.same) for a, b in zip(one, other, strict=True))


def _equal(one: StepResult, other: StepResult, same: float) -> bool:
    pairs = [(one.loss, other.loss)]
    pairs += [(g, other.gradients[n]) for n, g in one.gradients.items()]
    typical = root_mean_square(other.gradients.values())
    return one.gradients.keys() == other.gradients.keys() and all(
        relative_error(x, y, typical * y.numel() ** 0.5) < same for x, y in pairs
    )


Fates = Counter[tuple[str, str, str]]  # kind, way, what became of it


def table(fates: Fates, ways: Sequence[str]) -> Table:
    """Rows of kinds; of each way, how many there were, and what became of them."""
    ends = (KILLED, EQUAL, ALIVE)
    kinds = dict.fromkeys(kind for kind, _, _ in fates)

    def row(name: str, own: Sequence[str]) -> tuple[Any, ...]:
        counts = [[sum(fates[k, way, e] for k in own) for e in ends] for way in ways]
        return (name, *(n for c in counts for n in (sum(c), *c)))

    rows = [row(kind, [kind]) for kind in kinds]
    columns = [f"{way}:{what}" for way in ways for what in ("mutants", *ends)]
    title = f"{sum(fates.values())} mutants"
    return Table(title, ("kind", *columns), (*rows, row("all", list(kinds))))


def follow(
    plan: Planned, way: str, each: int = EACH, every: int = 1
) -> Iterator[tuple[Mutant, str]]:
    """Mutants of one plan, and what becomes of them: of so many of each kind every so
    manieth."""
    subject = WAYS[way](plan)
    subject.prove(subject.program)  # which is right
    for mutant in islice(mutants(plan, subject.program, each), 0, None, every):
        yield mutant, fate(subject, mutant.program)


def main(ways: list[str], first: int, last: int, each: int = EACH) -> int:
    """Prints the table, and which are not killed; how many are alive."""
    torch.set_num_threads(1)
    fates: Fates = Counter()
    for plan in PLANS[first : last + 1]:
        for way in ways:
            began, found = time.process_time(), Counter[str]()
            for mutant, end in follow(plan, way, each):
                found[end] += 1
                fates[mutant.kind, way, end] += 1
                if end != KILLED:
                    print(f"{way}: {end}: {mutant}"[:400], flush=True)
            spent = time.process_time() - began
            print(f"{plan} by {way}: {dict(found)}, {spent:.0f} s", flush=True)
    print(table(fates, ways))
    return sum(n for (_, _, end), n in fates.items() if end == ALIVE)


if __name__ == "__main__":
    ways = [w for w in sys.argv[1:] if w in WAYS] or list(WAYS)
    numbers = [int(argument) for argument in sys.argv[1:] if argument not in WAYS]
    first, last, each = numbers + [0, len(PLANS) - 1, EACH][len(numbers) :]
    sys.exit(main(ways, first, last, each) > 0)
