"""Small models and plans, of which programs are made and broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cases import Case
from models import llama, mixture, plain_gpt, switch_gpt

from autopar.options import make_plan
from autopar.passes.pipeline import compile_program
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program
from autopar.proof.expected import Expected, expect


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
    case = case if chosen.lowering or large else case.double()
    return case, compile_program(case.trace(chosen.lowering), chosen, PLAIN)
