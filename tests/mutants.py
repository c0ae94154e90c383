"""Programs that are broken on purpose: a proof must notice each that computes anything
else.

`python tests/mutants.py` makes all of them, over all plans, and prints the table of
what became of them; `python tests/mutants.py 3 7` those of plans 3 to 7.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from models import Case, llama, mixture, plain_gpt, switch_gpt
from mutate_programs import OF_PROGRAMS
from mutate_text import KINDS, places, with_line
from torch import Tensor

from autopar.options import make_plan
from autopar.proof.expected import TOLERANCE, Expected, expect
from autopar.proof.ranks import (
    FoundStep,
    GivenStep,
    VerificationFailed,
    relative_error,
    root_mean_square,
    run_steps,
)
from autopar.reports.tables import Table
from autopar.runtime.virtual import Deadlock, Mismatch
from autopar.verify import prove
from passes.cost import Costs
from passes.mesh import TIME
from passes.pipeline import compile_program
from passes.program import Program

EACH = 2  # mutants of each kind and plan
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


MODELS: dict[str, Callable[[], Case]] = {
    "gpt": lambda: plain_gpt(layers=2, heads=2, seq=4, vocab=11, batch=4),
    "deep": lambda: plain_gpt(layers=4, heads=2, seq=4, vocab=11, batch=4),
    "untied": lambda: plain_gpt(
        layers=2, heads=2, seq=4, vocab=12, batch=4, tied=False
    ),
    "dropout": lambda: plain_gpt(
        layers=2, heads=2, seq=4, vocab=11, batch=4, dropout=0.3
    ),
    "uneven": lambda: plain_gpt(layers=2, heads=3, seq=5, vocab=11, batch=4),
    "long": lambda: plain_gpt(layers=1, heads=2, seq=8, vocab=11, batch=2),
    "padded": lambda: llama(
        layers=2, heads=4, kv_heads=2, seq=6, vocab=11, batch=4, padded=True
    ),
    "experts": lambda: switch_gpt(layers=1, experts=4, batch=4, seq=6),
    "routed": lambda: mixture(
        "mixtral",
        {"batch": 4, "seq": 5, "vocab": 11},
        num_hidden_layers=1,
        vocab_size=11,
    ),
    "queries": lambda: llama(
        layers=1, heads=4, kv_heads=2, seq=4, vocab=11, batch=4, padded=True
    ),
    "top2": lambda: switch_gpt(layers=1, experts=4, top_k=2, batch=4, seq=6),
}

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


@lru_cache(maxsize=2)
def prepared(plan: Planned) -> tuple[Case, Program, list[Expected]]:
    """The program, and what the untouched model computes."""
    chosen = make_plan(plan.mesh, **dict(plan.options))
    case = MODELS[plan.build]()
    case = case if chosen.dtype else case.double()
    program = compile_program(case.trace(chosen.dtype), chosen, Costs())
    return case, program, expect(program, *case)


# --- mutants ------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    plan: Planned
    kind: str
    what: str
    program: Program

    def __str__(self) -> str:
        return f"{self.plan}\n  {self.kind}: {self.what}"


def mutants(plan: Planned, each: int = EACH) -> Iterator[Mutant]:
    """Of each kind so many, drawn by chance, but always the same."""
    _, program, _ = prepared(plan)
    for kind, found in [*_of_text(program), *_of_program(program)]:
        chance = random.Random(f"{plan} {kind}")
        for what, changed in chance.sample(found, min(each, len(found))):
            made = changed() if callable(changed) else changed
            if callable(changed) and chance.random() < ALONE:
                what, made = f"one rank: {what}", on_one_rank(program, made, chance)
            yield Mutant(plan, kind, what, made)


def on_one_rank(program: Program, mutant: Program, chance: random.Random) -> Program:
    """A rank runs the mutant's text, all others the program's."""
    places = [
        (number, coords)
        for number, stage in enumerate(program.stages)
        for coords, key in stage.modules.items()
        if mutant.modules[key] != guarded(program.modules[key])
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
        place.line: place
        for text in program.modules.values()
        for place in places(text, sizes)
    }
    for kind, mutate in KINDS.items():
        found = [
            (f"{place.line}  ->  {new}", _with_line(program, place.line, new))
            for place in known.values()
            for new in mutate(place)
            if new != place.line
        ]
        yield kind, found


def _with_line(program: Program, old: str, new: str | None) -> Callable[[], Program]:
    """In each module that has the line."""

    def change() -> Program:
        modules = program.modules.items()
        texts = {k: guarded(with_line(t, old, new)) for k, t in modules}
        return replace(program, modules=texts)

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


def guarded(text: str) -> str:
    """The text, with its own checks before what does not check."""
    text = text.replace(
        "aten.native_layer_norm_backward.default", "_layer_norm_backward"
    )
    for name in ("kernels.attention_backward", "c.attention_backward"):
        text = text.replace(f"{name}(", f"_guarded({name})(")
    return text + GUARDS


# --- what becomes of them -----------------------------------------------------------

KILLED = (
    "an error", "a mismatch", "a deadlock", "replicas", "the loss", "a gradient",
)  # fmt: skip
EQUAL, HOLE = "computes the same", "A HOLE"


def fate(mutant: Mutant) -> str:
    """By what a mutant is noticed; or that it computes the same; or neither."""
    case, original, known = prepared(mutant.plan)
    # Of its own, as it may write into them.
    expected = [replace(e, batch=copied(e.batch)) for e in known]
    program = replace(mutant.program, literals=copied(original.literals))
    buffers = copied(dict(case.model.named_buffers()))
    try:
        proof = prove(program, buffers, expected)
    except Deadlock:
        return "a deadlock"
    except Mismatch:
        return "a mismatch"
    except VerificationFailed:
        return "replicas"
    except Exception:
        return "an error"
    if not proof.passed:
        return "the loss" if proof.worst[0] == "loss" else "a gradient"
    same = all(_same(mutant.program, original, case, seed) for seed in SEEDS)
    return EQUAL if same else HOLE


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in tensors.items()}


def _same(mutant: Program, original: Program, case: Case, seed: int) -> bool:
    """Whether two programs compute the same for what is drawn from a seed."""
    buffers = dict(case.model.named_buffers())
    given = expect(original, *case, seed)
    steps = [GivenStep(e.weights, e.batch) for e in given]
    try:
        one, other = (run_steps(p, buffers, steps, seed) for p in (mutant, original))
    except Exception:
        return False
    precision = original.plan.dtype
    same = SAME if precision is None else torch.finfo(precision).eps
    if precision is None and given[0].tolerance > TOLERANCE[torch.float64]:
        same = ROUNDED  # the model has norms in float32
    return all(_equal(a, b, same) for a, b in zip(one, other, strict=True))


def _equal(one: FoundStep, other: FoundStep, same: float) -> bool:
    pairs = [(one.loss, other.loss)]
    pairs += [(g, other.gradients[n]) for n, g in one.gradients.items()]
    typical = root_mean_square(other.gradients.values())
    return one.gradients.keys() == other.gradients.keys() and all(
        relative_error(x, y, typical * y.numel() ** 0.5) < same for x, y in pairs
    )


def table(fates: Counter[tuple[str, str]]) -> Table:
    """Rows of kinds, columns of fates."""
    columns = (*KILLED, EQUAL, HOLE)
    kinds = dict.fromkeys(kind for kind, _ in fates)
    rows = [(k, *(fates[k, c] or "" for c in columns)) for k in kinds]
    total = [sum(fates[k, c] for k in kinds) for c in columns]
    title = f"{sum(total)} mutants"
    return Table(title, ("kind", *columns), (*rows, ("all", *total)))


def main(first: int, last: int) -> int:
    torch.set_num_threads(1)
    fates: Counter[tuple[str, str]] = Counter()
    for plan in PLANS[first : last + 1]:
        found: Counter[str] = Counter()
        for mutant in mutants(plan):
            end = fate(mutant)
            found[end] += 1
            fates[mutant.kind, end] += 1
            if end in (EQUAL, HOLE):
                print(f"{end}: {mutant.kind}: {mutant.what[:300]}", flush=True)
        print(plan, dict(found), flush=True)
    print(table(fates))
    return sum(n for (_, end), n in fates.items() if end == HOLE)


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]] or [0, len(PLANS) - 1]
    sys.exit(main(numbers[0], numbers[-1]) > 0)
