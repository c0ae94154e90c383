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
from models import Case, llama, mixture, plain_gpt, switch_gpt
from mutate_programs import OF_PROGRAMS
from mutate_text import KINDS, Place, places, with_line
from torch import Tensor

import autopar.proof.prove_program as prover
from autopar.options import make_plan
from autopar.proof.expected import TOLERANCE, Expected, expect
from autopar.proof.full_size import check_full_size
from autopar.proof.in_double import program_in_double
from autopar.proof.ranks import (
    FoundStep,
    GivenStep,
    relative_error,
    root_mean_square,
    run_steps,
)
from autopar.proof.small import Runnable, make_small, whole
from autopar.reports.tables import Table
from autopar.verify import Verification, prove
from passes.cost import Costs
from passes.mesh import TIME
from passes.pipeline import compile_program
from passes.program import Program

EACH = 2  # mutants of each kind, plan and way
ALONE = 0.3  # the chance that one rank alone runs a changed text
SEEDS = (11, 12, 13)  # of draws that tell whether a survivor computes the same
ROUNDED = 1e-6  # the same, in float32
SAME = 1e-12  # relative, in float64: sums in another order; else one rounding


@dataclass(frozen=True)
class Planned:
    """A small model, and how it is compiled."""

    build: str
    mesh: str
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options)
        return f"{self.build} on '{self.mesh}' {options}".strip()


def planned(build: str, mesh: str, **options: Any) -> Planned:
    return Planned(build, mesh, tuple(options.items()))


def routed(layers: int, seq: int, vocab: int, batch: int) -> Case:
    tokens = {"batch": batch, "seq": seq, "vocab": vocab}
    return mixture("mixtral", tokens, num_hidden_layers=layers, vocab_size=vocab)


GPT = {"layers": 2, "heads": 2, "seq": 4, "vocab": 11, "batch": 4}
LLAMA = {"layers": 2, "heads": 4, "kv_heads": 2, "seq": 6, "vocab": 11, "batch": 4}
SWITCH = {"batch": 4, "seq": 6}

MODELS: dict[str, tuple[Callable[..., Case], dict[str, int], dict[str, Any]]] = {
    "gpt": (plain_gpt, GPT, {}),
    "deep": (plain_gpt, {**GPT, "layers": 4}, {}),
    "untied": (plain_gpt, {**GPT, "vocab": 12}, {"tied": False}),
    "dropout": (plain_gpt, GPT, {"dropout": 0.3}),
    "uneven": (plain_gpt, {**GPT, "heads": 3, "seq": 5}, {}),
    "long": (plain_gpt, {**GPT, "layers": 1, "seq": 8, "batch": 2}, {}),
    "padded": (llama, LLAMA, {"padded": True}),
    "queries": (llama, {**LLAMA, "layers": 1, "seq": 4}, {"padded": True}),
    "experts": (switch_gpt, SWITCH, {"layers": 1, "experts": 4}),
    "top2": (switch_gpt, SWITCH, {"layers": 1, "experts": 4, "top_k": 2}),
    "routed": (routed, {"layers": 1, "seq": 5, "vocab": 11, "batch": 4}, {}),
}
# How many times as much a large model has.
LARGE = {"layers": 2, "heads": 3, "kv_heads": 3, "seq": 5, "vocab": 5, "batch": 3}


def model(build: str, large: bool = False) -> Case:
    make, sizes, options = MODELS[build]
    times = LARGE if large else {}
    return make(**{k: n * times.get(k, 1) for k, n in sizes.items()}, **options)


PLANS = (
    planned("gpt", "tp=2"),
    planned("gpt", "tp=2", sequence_parallel=False),
    planned("gpt", "dp=2", microbatches=2),
    planned("gpt", "pp=2", microbatches=2),
    planned("gpt", "pp=2,tp=2", microbatches=2),
    planned("gpt", "dp=2,tp=2", microbatches=2),
    planned("gpt", "pp=2,dp=2", microbatches=2),
    planned("gpt", "dp=2,tp=2", zero=1),
    planned("gpt", "dp=2", microbatches=2, zero=2),
    planned("gpt", "dp=2", microbatches=2, zero=3),
    planned("gpt", "pp=2,dp=2", microbatches=2, zero=3),
    planned("gpt", "dp=2,fsdp=2", zero=3),
    planned("gpt", "tp=2", microbatches=2, recompute="full"),
    planned("gpt", "pp=2", microbatches=4, recompute="full", schedule="gpipe"),
    planned("gpt", "pp=2", microbatches=4, schedule="zb-h1"),
    planned("gpt", "pp=2,tp=2", microbatches=4, schedule="zb-h2"),
    planned("deep", "pp=2", microbatches=4, schedule="interleaved", stages_per_rank=2),
    planned("deep", "pp=2", microbatches=4, schedule="zb-v", stages_per_rank=2),
    planned("deep", "pp=2", microbatches=4, schedule="looped-bfs", stages_per_rank=2),
    planned("deep", "pp=4", microbatches=4),
    planned("untied", "pp=2,tp=2", microbatches=2),
    planned("untied", "tp=4"),
    planned("dropout", "dp=2,tp=2", microbatches=2),
    planned("dropout", "pp=2", microbatches=2, recompute="selective"),
    planned("dropout", "cp=2"),
    planned("uneven", "tp=2"),
    planned("uneven", "tp=2,dp=2", sequence_parallel=False, zero=3),
    planned("uneven", "pp=2,tp=3", microbatches=2),
    planned("long", "cp=2", context_parallel="gather"),
    planned("long", "cp=2", context_parallel="ring"),
    planned("long", "cp=2", context_parallel="ring", cp_layout="contiguous"),
    planned("long", "cp=4", context_parallel="ring"),
    planned("long", "cp=2", context_parallel="ulysses"),
    planned("long", "cp=2,tp=2", context_parallel="gather", microbatches=2),
    planned("padded", "tp=2", microbatches=2),
    planned("padded", "tp=4", sequence_parallel=False),
    planned("padded", "pp=2,cp=2", microbatches=2),
    planned("padded", "dp=2,tp=2", zero=2),
    planned("experts", "ep=2", microbatches=2),
    planned("experts", "ep=2,tp=2"),
    planned("top2", "dp=2,ep=2"),
    planned("routed", "ep=2", microbatches=2),
    planned("routed", "ep=2,tp=2"),
    planned("queries", "tp=4"),
    planned("queries", "cp=2", context_parallel="ulysses"),
    planned("gpt", "dp=2,tp=2", microbatches=2, precision="bf16"),
    planned("gpt", "pp=2", microbatches=2, precision="fp16"),
)


# What is kept for the backward depends on how large it is.
NOT_ALIKE = (planned("padded", "pp=2,cp=2", microbatches=2),)


@lru_cache(maxsize=2)
def prepared(plan: Planned) -> tuple[Case, Program, list[Expected]]:
    """The program, and what the untouched model computes."""
    case, program = compiled(plan)
    return case, program, expect(program, *case)


def compiled(plan: Planned, large: bool = False) -> tuple[Case, Program]:
    chosen = make_plan(plan.mesh, **dict(plan.options))
    case = model(plan.build, large)
    case = case if chosen.dtype or large else case.double()
    return case, compile_program(case.trace(chosen.dtype), chosen, Costs())


# --- ways to prove ------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A program, and a way to prove it.

    prove: any program in its place; raises what it notices. run: two steps of any, with
    what is drawn from a seed. same: how far two that compute the same may be apart.
    """

    program: Program
    prove: Callable[[Program], object]
    run: Callable[[Program, int], Sequence[FoundStep]]
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
    def drawn(seed: int) -> list[GivenStep]:
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

    def check(program: Program) -> None:
        prover.check_transfer(program, small)
        check_full_size(program)

    traced = case.trace(program.plan.dtype)
    runnable = whole(program, case.model, traced)
    return Subject(program, check, in_float64(runnable, case))


WAYS: dict[str, Callable[[Planned], Subject]] = {
    "verify": by_verify,
    "small": by_small,
    "transfer": by_transfer,
}


def in_float64(
    runnable: Runnable, case: Case
) -> Callable[[Program, int], list[FoundStep]]:
    @lru_cache
    def drawn(seed: int) -> list[Expected]:
        return prover.expect(runnable, case.batch, seed)

    def run(program: Program, seed: int) -> list[FoundStep]:
        program, steps = program_in_double(guarded(program)), drawn(seed)
        return run_steps(program, copied(steps[0].buffers), given(steps), seed)

    return run


def own(expected: Sequence[Expected]) -> list[Expected]:
    """The same, with tensors that a program may write into."""
    return [
        replace(e, batch=copied(e.batch), buffers=copied(e.buffers)) for e in expected
    ]


def given(expected: Sequence[Expected]) -> list[GivenStep]:
    return [GivenStep(e.weights, copied(e.batch)) for e in expected]


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
    """Of each kind so many, drawn by chance, but always the same."""
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
    def checked(dy, q, k, v, out, lse, *rest):
        assert dy.shape == out.shape == (*q.shape[:3], v.shape[3])
        assert lse.shape == q.shape[:3] and k.shape[:3] == v.shape[:3]
        return call(dy, q, k, v, out, lse, *rest)

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


def _equal(one: FoundStep, other: FoundStep, same: float) -> bool:
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
