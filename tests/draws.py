"""Random combinations of a model, a mesh, a schedule and every option of `compile`.

`draw(seed)` is the same each time, and legal: what cannot be combined is not drawn.
`python tests/draws.py 137` proves one draw alone, `python tests/draws.py 0 999` many.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from models import Case, gpt2, llama, mixture, opt, plain_gpt, switch_gpt

from autopar.options import LAYOUTS, make_plan
from autopar.verify import Verification, verify
from passes.capture.trace import Traced, trace
from passes.cost import Costs
from passes.mesh import AXES
from passes.pipeline import compile_program
from passes.plan import AUTO, CONTEXT_PARALLEL, PRECISION, RECOMPUTE, ZERO
from passes.schedule.make_schedule import SCHEDULES

MOST_RANKS = 8
MOST_STAGES = 16  # into which one layer, with its embedding and its loss, can be cut
SHARING = 8  # consecutive draws have the same model, which is then traced once

Values = dict[str, Any]  # what was drawn so far, by name
Choices = dict[str, Callable[[Values], list[Any]]]  # name -> what it may be, then


# --- what there is to draw ----------------------------------------------------------

SIZES: Choices = {
    "layers": lambda v: [1, 2, 2, 3],
    "batch": lambda v: [1, 2, 4, 6, 8, 8, 12, 12],
    "seq": lambda v: [8, 9, 16, 17],
}
# Of a batch of one nothing can be left out.
LABELS: Choices = {
    "ignored": lambda v: ["none", "half", "uneven"] if v["batch"] > 1 else ["none"]
}
HEADS: Choices = {"heads": lambda v: [1, 2, 3, 4, 4, 6]}
TEXT: Choices = {
    "vocab": lambda v: [101, 64, 7],
    "tied": lambda v: [True, False],
}
DROPOUT: Choices = {"dropout": lambda v: [0.0, 0.2]}
PADDED: Choices = {"padded": lambda v: [True, False]}
EXPERTS: Choices = {
    "experts": lambda v: [2, 3, 4, 7, 8],
    "top_k": lambda v: [1, 2],
}

MODELS: dict[str, Choices] = {
    "plain_gpt": {
        **SIZES,
        "seq": lambda v: [1, 2, 8, 16, 17],
        **HEADS,
        **LABELS,
        **TEXT,
        **DROPOUT,
    },
    "gpt2": {**SIZES, **HEADS, **LABELS, **TEXT, **DROPOUT, **PADDED},
    "llama": {
        **SIZES,
        **HEADS,
        "kv_heads": lambda v: [n for n in range(1, 7) if v["heads"] % n == 0],
        **LABELS,
        **TEXT,
        **PADDED,
    },
    "opt": {**SIZES, **HEADS, **LABELS, **PADDED},
    "switch_gpt": {**SIZES, **EXPERTS},
    "mixture": {
        "name": lambda v: ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"],
        **SIZES,
        **EXPERTS,
        **LABELS,
        **PADDED,
    },
}

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
    "zero": lambda v: [zero for zero in ZERO if shares(v) in (bool(zero), None)],
    "offload": lambda v: [False, True],
    "precision": lambda v: ["model"] * 4 + LOWER,
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
    in_one_piece = {"cp"} if v["cp_layout"] != "zigzag" else set()
    return None if {*SAMPLES, *in_one_piece} & v["written"] else False


def sample_ranks(v: Values) -> int:
    """The parts into which the mesh splits the batch."""
    return prod(v[axis] for axis in SAMPLES)


def can_ring(v: Values) -> bool:
    """Whether keys and values can go round: attention is fused, each rank has a row."""
    fused = not v.get("dropout") and v.get("name") != "gpt_oss"
    return v["cp"] == 1 or (fused and v["seq"] >= v["cp"])


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


# --- a draw -------------------------------------------------------------------------


class DrawFailed(AssertionError):
    """A draw does not compile, or not to what its model computes."""


@dataclass(frozen=True)
class Model:
    """A function of `models` and its arguments; frozen: this share of parameters."""

    kind: str
    sizes: tuple[tuple[str, Any], ...]
    frozen: float

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={value!r}" for name, value in self.sizes)
        return f"{self.kind}({sizes}), {self.frozen:.0%} frozen"

    def build(self, dtype: torch.dtype = torch.float64) -> Case:
        sizes = dict(self.sizes)
        case = (_mixture if self.kind == "mixture" else BUILDERS[self.kind])(**sizes)
        chance = random.Random(str(self))
        for p in list(case.model.parameters())[:-1]:
            p.requires_grad_(chance.random() >= self.frozen)
        return case.double() if dtype is torch.float64 else case


BUILDERS: dict[str, Callable[..., Case]] = {
    f.__name__: f for f in (plain_gpt, gpt2, llama, opt, switch_gpt)
}


def _mixture(name: str, layers: int, experts: int, top_k: int, **tokens: Any) -> Case:
    return mixture(
        name,
        tokens,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts=experts,
        num_experts_per_tok=top_k,
    )


@dataclass(frozen=True)
class Draw:
    seed: int
    model: Model
    mesh: str
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options)
        return f"draw {self.seed}: {self.model}, on '{self.mesh}' with {options}"

    def prove(self) -> Verification:
        """Run all ranks, compare with the model. Raises DrawFailed."""
        try:
            plan = make_plan(self.mesh, **dict(self.options))
            # Autocast leaves double precision as it is.
            dtype = torch.float32 if plan.dtype else torch.float64
            case, traced = traced_case(self.model, dtype)
            program = compile_program(traced, plan, Costs())
            return verify(program, *case, seed=self.seed).check()
        except Exception as error:
            raise DrawFailed(
                f"{self}\n{type(error).__name__}: {error}\n"
                f"alone: python tests/draws.py {self.seed}"
            ) from error


@lru_cache(maxsize=2)
def traced_case(model: Model, dtype: torch.dtype) -> tuple[Case, Traced]:
    case = model.build(dtype)
    return case, trace(*case)


def draw(seed: int) -> Draw:
    """The draw of a number. Each value has its own source of chance, so that a new
    option leaves what was drawn for the others as it is."""
    model = draw_model(seed // SHARING)
    sizes = dict(model.sizes)

    def chance(name: str) -> random.Random:
        return random.Random(f"{seed} {name}")

    mesh = chance("mesh").choice(
        [m for m in MESHES if sizes["batch"] % sample_ranks(m) == 0]
    )
    written = [
        axis
        for axis, n in mesh.items()
        if n > 1 or chance(f"write {axis}=1").random() < 0.2
    ]
    chance("order").shuffle(written)
    known = {"model": model.kind, **sizes, **mesh, "written": set(written)}
    options = draw_values(OPTIONS, known, chance)
    text = ",".join(f"{axis}={mesh[axis]}" for axis in written)
    return Draw(seed, model, text, tuple(options.items()))


def draw_model(seed: int) -> Model:
    def chance(name: str) -> random.Random:
        return random.Random(f"model {seed} {name}")

    kind = list(MODELS)[seed % len(MODELS)]
    sizes = draw_values(MODELS[kind], {}, chance)
    frozen = chance("frozen").choice([0.0, 0.0, 0.3, 0.9])
    return Model(kind, tuple(sizes.items()), frozen)


def draw_values(
    choices: Choices, known: Values, chance: Callable[[str], random.Random]
) -> Values:
    drawn: Values = {}
    for name, of in choices.items():
        drawn[name] = chance(name).choice(of({**known, **drawn}))
    return drawn


def main(first: int, last: int) -> int:
    """Prove draws first to last, all of them; the number of those that failed."""
    torch.set_num_threads(1)
    failed = 0
    for seed in range(first, last + 1):
        print(draw(seed), flush=True)
        try:
            print("  ", draw(seed).prove().worst, flush=True)
        except DrawFailed as error:
            failed += 1
            print(f"FAILED {error}", flush=True)
    return failed


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(numbers[0], numbers[-1]) > 0)
