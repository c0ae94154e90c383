"""A small plan that tests of what reads plans share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import autopar
from autopar.passes.cost import Costs
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.program import Program
from examples.gpt import GPT, Config, build

CONFIG = Config(layers=2, width=32, heads=2, context=16, vocab=64)
BATCH = 4

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"


def model_file(folder: Path) -> str:
    """Write a file with a factory of the model; returns its specification."""
    path = folder / "model.py"
    factory = f"\n\ndef small():\n    return build({CONFIG!r}, {BATCH})\n"
    path.write_text(EXAMPLE.read_text() + factory)
    return f"{path}:small"


def small_model() -> GPT:
    return build(CONFIG, BATCH)[0]


@cache
def small_program(
    mesh: str = "pp=2,tp=2",
    microbatches: int = 2,
    schedule: str = "1f1b",
    stages_per_rank: int = 1,
    zero: int = 0,
    offload: bool = False,
    prove: bool = False,
) -> Program:
    model, batch = build(CONFIG, BATCH)
    plan = Plan(
        Mesh.parse(mesh), microbatches, schedule, stages_per_rank,
        zero=zero, offload=offload,
    )  # fmt: skip
    return autopar.compile_offline(model, batch, plan, costs=Costs(), prove=prove)
