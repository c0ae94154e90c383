"""A small plan that tests of what reads plans share."""

from __future__ import annotations

import io
import json
import os
import shutil
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

import autopar
from autopar.cli import main
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program
from autopar.step import Step
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


def tiny_file(folder: Path, *sizes: float, batch: int = BATCH) -> str:
    """Write a file with a factory of a model of these sizes; returns its specification.
    Without any: 2 layers, width 32, 4 heads, 16 rows, 64 words, dropout."""
    config = ", ".join(map(str, sizes or (2, 32, 4, 16, 64, 0.1)))
    made = f"build(Config({config}), batch={batch})"
    text = f"from examples.gpt import Config, build\ntiny = lambda: {made}\n"
    (folder / "model.py").write_text(text)
    return f"{folder / 'model.py'}:tiny"


def tiny_plan(folder: Path, *sizes: float, mesh: str = "tp=1") -> str:
    """A plan of `tiny_file`, beside it; compiled once of all that are alike."""
    kept = _compiled(mesh, *sizes)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    manifest = folder / "plan" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(str(kept), str(folder)))
    return str(folder / "plan")


@cache
def _compiled(mesh: str, *sizes: float) -> Path:
    folder = Path(mkdtemp(dir=os.environ["XDG_CACHE_HOME"]))  # this run's own
    line = ["compile", tiny_file(folder, *sizes), "--mesh", mesh]
    with redirect_stdout(io.StringIO()):
        assert main([*line, "-o", str(folder / "plan")]) == 0
    return folder


def rows(text: str) -> list[dict[str, float]]:
    """What a run says of its steps, as JSON."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


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
    return autopar.compile_offline(model, batch, plan, cluster=PLAIN, prove=prove)


def batch_of(seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(CONFIG.vocab, (BATCH, CONFIG.context + 1), generator=drawn)
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def made(program: Program, **options: Any) -> Step:
    torch.manual_seed(0)
    step = autopar.compile(small_model(), program.mesh, program=program, **options)
    return step.build(**batch_of(0))
