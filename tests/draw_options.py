"""Draws of a mesh and of every option of `compile` for any model, and their proof.

What is drawn is the same each time for a number, and legal as far as options go: what
cannot be combined is not drawn.
"""

from __future__ import annotations

import random
import re
import sys
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

# The examples are found by pytest, and so by the scripts that draw.
sys.path.append(str(Path(__file__).parents[1]))

from autopar.options import LAYOUTS, make_plan
from autopar.passes.capture.trace import trace
from autopar.passes.errors import (
    AutoparError,
    CaptureError,
    LossNotSeparable,
    ShardingConflict,
)
from autopar.passes.mesh import AXES, Mesh
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import AUTO, CONTEXT_PARALLEL, PRECISION, RECOMPUTE
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program
from autopar.passes.schedule.make_schedule import SCHEDULES
from autopar.passes.traced import Traced
from autopar.proof.ranks import VerificationFailed
from autopar.proof.verification import Verification
from autopar.verify import verify

if TYPE_CHECKING:
    from models import Case

MOST_RANKS = 8
MOST_STAGES = 16  # into which one layer, with its embedding and its loss, can be cut

Values = dict[str, Any]  # what was drawn so far, by name
Choices = dict[str, Callable[[Values], list[Any]]]  # name -> what it may be, then
Chance = Callable[[str], random.Random]  # the source of chance of a name

# One stage a rank, or several.
STAGES_PER_RANK = {
    "interleaved": [2, 3],
    "looped-bfs": [2, 3],
    "zb-v": [2],
    AUTO: [1, 2],
}

# The options of `compile`, in the order in which they are drawn.
OPTIONS: Choices = {
    "microbatches": lambda v: divisors(v["batch"] // sample_ranks(v)),
    "schedule": lambda v: [*SCHEDULES, AUTO],
    "stages_per_rank": lambda v: [
        n for n in STAGES_PER_RANK.get(v["schedule"], [1]) if n * v["pp"] <= MOST_STAGES
    ],
    "sequence_parallel": lambda v: [True, False],
    "context_parallel": lambda v: [
        method for method in CONTEXT_PARALLEL if method != "ring" or can_ring(v)
    ],
    # Ranks that see all rows gain nothing by a zigzag.
    "cp_layout": lambda v: [
        layout
        for layout in (None, *LAYOUTS)
        if (layout, v["context_parallel"]) != ("zigzag", "ulysses")
    ],
    "recompute": lambda v: [*RECOMPUTE, AUTO],
    "memory": lambda v: ["1GiB"] if v["recompute"] == AUTO else [0, "1GiB"],
    "zero": lambda v: [zero for zero in range(4) if shares(v) in (bool(zero), None)],
    "offload": lambda v: [False, True],
    "precision": lambda v: ["model"] * 4 + rounds(v),
    "loss_chunks": lambda v: [1, 1, 2, 3],
    "hints": lambda v: [None, *HINTS.get(v["model"], ())] if v["tp"] > 1 else [None],
}

LOWER = [name for name in PRECISION if name != "model"]

HINTS: dict[str, list[dict[str, str]]] = {
    "plain_gpt": [{"*.mlp.up.weight": "embed/tp"}, {"*.proj.weight": "embed/tp"}],
    "gpt2": [{"*.c_fc.weight": "embed/tp"}, {"transformer.wte.weight": "embed/tp"}],
}

SAMPLES = ("dp", "fsdp", "ep")  # axes whose ranks have other samples

MESHES: list[dict[str, int]] = [{}]
for _axis in AXES:
    MESHES = [
        {**mesh, _axis: n}
        for mesh in MESHES
        for n in range(1, MOST_RANKS // prod(mesh.values()) + 1)
    ]


def shares(v: Values) -> bool | None:
    """Whether the mesh needs ZeRO, or cannot have it; None if either is right."""
    if v["fsdp"] > 1:
        return True
    return None if {*SAMPLES, "cp"} & v["written"] else False


def sample_ranks(v: Values) -> int:
    """The parts into which the mesh splits the batch."""
    return prod(v[axis] for axis in SAMPLES)


def rounds(v: Values) -> list[str]:
    """Precisions that a model's loss can be summed in: one that rounds a mean over
    tokens, as a balance of experts, needs it whole."""
    whole = v["microbatches"] == 1 or v.get("model") != "switch_gpt"
    return [name for name in LOWER if whole or name != "bf16-stream"]


def can_ring(v: Values) -> bool:
    """Whether keys and values can go round: attention is fused, each rank has a row."""
    fused = not v.get("dropout") and v.get("name") != "gpt_oss" and v.get("fused", True)
    return v["cp"] == 1 or (fused and v["seq"] >= v["cp"])


def spanning(sets: Sequence[Set[Any]], costs: Sequence[float] = ()) -> list[int]:
    """Places of a few of the sets that have between them all that all sets have, rather
    of those that cost little; all cost the same, if `costs` are not given."""
    each = costs or [1.0] * len(sets)
    missing, chosen = {value for one in sets for value in one}, list[int]()
    while missing:
        gains = [
            len(one & missing) / cost for one, cost in zip(sets, each, strict=True)
        ]
        chosen.append(gains.index(max(gains)))
        missing -= sets[chosen[-1]]
    times = Counter(value for i in chosen for value in sets[i])
    for i in sorted(chosen, key=lambda i: -each[i]):  # what others had to be there for
        if all(times[value] > 1 for value in sets[i]):
            chosen.remove(i)
            times.subtract(sets[i])
    return sorted(chosen)


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


# --- a draw --------------------------------------------------------------------------


class DrawFailed(AssertionError):
    """A draw does not compile, or not to what its model computes."""


class Drawn(Protocol):
    """A drawn model; hashable, and equal to those that build the same."""

    def build(self, dtype: torch.dtype) -> Case: ...

    def with_batch(self, samples: int) -> Drawn: ...


@dataclass(frozen=True)
class Draw:
    """script: the file of `tests` that repeats the draw."""

    seed: int
    model: Drawn
    mesh: str
    options: tuple[tuple[str, Any], ...]
    script: str = "draws.py"

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options)
        return f"draw {self.seed}: {self.model}, on '{self.mesh}' with {options}"

    def prove(self) -> Verification:
        """Run all ranks, compare with the model. Raises DrawFailed."""
        try:
            plan = make_plan(self.mesh, **dict(self.options))
            # Autocast leaves double precision as it is.
            dtype = torch.float32 if plan.dtype else torch.float64
            case, traced = traced_case(self.model, dtype, plan.lowering)
            return self.check(compile_program(traced, plan, PLAIN), case)
        except Exception as error:
            raise DrawFailed(
                f"{self}\n{type(error).__name__}: {error}\n"
                f"alone: python tests/{self.script} {self.seed}"
            ) from error

    def check(self, program: Program, case: Case) -> Any:
        drawn = self.seed % 2 == 1  # batches of cases have padding of their own
        return verify(program, *case, seed=self.seed, drawn=drawn).check()


@lru_cache(maxsize=2)
def traced_case(
    model: Drawn, dtype: torch.dtype, precision: torch.dtype | None
) -> tuple[Case, Traced]:
    case = model.build(dtype)
    return case, trace(*case, precision=precision)


# --- what came of a draw -------------------------------------------------------------

# What is said of the model must name its line; of the plan alone there is none.
OF_THE_MODEL = (CaptureError, LossNotSeparable, ShardingConflict)
MOST_CHANGES = 3
CHANGE = re.compile(r"""\b(\w+)=(True|False|\d+|'[^']*'|"[^"]*")|leave (\w+) out""")
BATCH = re.compile(r"use a batch that (\d+) divides")


def prove_all(draws: Iterable[Draw]) -> int:
    """Prove all of them, print and count what came out; the number that failed."""
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    for one in draws:
        print(one, flush=True)
        try:
            result = outcome(one)
            print("  ", result, flush=True)
        except DrawFailed as error:
            result = "failed"
            print(f"FAILED {error}", flush=True)
        found[result.partition(":")[0]] += 1
    print(", ".join(f"{n} {result}" for result, n in found.items()))
    return found["failed"]


def outcome(one: Draw) -> str:
    """Returns "right", or why it was refused, in a line without numbers of this draw.

    What a refusal says to do about the plan is done, and must make the draw right, if
    need be after what is said then. Raises DrawFailed where it was neither.
    """
    told: list[AutoparError] = []
    while True:
        try:
            one.prove()
        except DrawFailed as failed:
            told.append(refusal(failed))
            changed = mended(one, told[-1].fix)
            if len(told) > MOST_CHANGES or changed == one:
                fixes = "; ".join(error.fix for error in told)
                raise DrawFailed(f"no fix of these: {fixes}\n{failed}") from failed
            if changed is None:
                return f"refused, what to do is not tried: {_headline(told)}"
            one = changed
        else:
            return (
                f"refused, what to do is right: {_headline(told)}" if told else "right"
            )


def _headline(told: list[AutoparError]) -> str:
    return " -> ".join(f"{e.message.splitlines()[0]} [{e.fix}]" for e in told)


def refusal(failed: DrawFailed) -> AutoparError:
    """Returns what refused a draw, with a fix and a line of the model if it is of the
    model; otherwise raises the failure."""
    error = failed.__cause__
    if not isinstance(error, AutoparError) or isinstance(error, VerificationFailed):
        raise failed
    if not error.fix or (isinstance(error, OF_THE_MODEL) and not error.source):
        raise DrawFailed(f"refused without a line or a fix: {failed}") from error
    return error


def mended(one: Draw, fix: str) -> Draw | None:
    """Returns a draw with the first change of the plan that a fix names, or with the
    batch; None if it names none, as where the model is to change."""
    for name, value, left_out in CHANGE.findall(fix):
        options = dict(one.options)
        if options.pop(left_out, None) is not None:
            return replace(one, options=tuple(options.items()))
        if name in OPTIONS:
            options[name] = literal_eval(value)
            return replace(one, options=tuple(options.items()))
        if name in AXES:
            axes = {**dict(Mesh.parse(one.mesh).axes), name: value}
            return replace(one, mesh=",".join(f"{a}={n}" for a, n in axes.items()))
    if (samples := BATCH.search(fix)) is not None:
        return replace(one, model=one.model.with_batch(int(samples[1])))
    return None


# --- what is drawn -------------------------------------------------------------------


def draw_mesh(
    sizes: Values, chance: Chance, most: int
) -> tuple[dict[str, int], list[str]]:
    """Returns the ranks of every axis, and the axes that are written down, in order."""
    mesh = chance("mesh").choice(
        [
            m
            for m in MESHES
            if sizes["batch"] % sample_ranks(m) == 0 and prod(m.values()) <= most
        ]
    )
    written = [
        axis
        for axis, n in mesh.items()
        if n > 1 or chance(f"write {axis}=1").random() < 0.2
    ]
    chance("order").shuffle(written)
    return mesh, written


def draw_plan(
    kind: str, sizes: Values, chance: Chance, most: int = MOST_RANKS
) -> tuple[str, Values]:
    """Returns a mesh of so many ranks at most, as text, and every option of `compile`.

    kind: of the model, as `HINTS` has it. sizes: of the model and its batch, by name.
    """
    mesh, written = draw_mesh(sizes, chance, most)
    known = {"model": kind, **sizes, **mesh, "written": set(written)}
    text = ",".join(f"{axis}={mesh[axis]}" for axis in written)
    return text, draw_values(OPTIONS, known, chance)


def draw_values(choices: Choices, known: Values, chance: Chance) -> Values:
    drawn: Values = {}
    for name, of in choices.items():
        drawn[name] = chance(name).choice(of({**known, **drawn}))
    return drawn


def chance_of(prefix: str) -> Chance:
    """Each value has its own source of chance, so that a new option leaves what was
    drawn for the others as it is."""
    return lambda name: random.Random(f"{prefix} {name}")
