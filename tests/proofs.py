"""A model and plans of it whose proofs tests look at."""

from __future__ import annotations

from typing import Any

from cases import Case
from torch import Tensor, nn

import autopar
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program
from autopar.passes.proof_record import CutShort, Proof
from autopar.proof.full_size import check_full_size
from autopar.proof.prove_program import prove_program
from examples.gpt import Config, build

# Nothing is small enough to be run as it is, and nothing is too large to be refused.
BIG = Config(layers=6, width=48, heads=6, context=40, vocab=64)


def compiled(
    mesh: str, microbatches: int = 2, config: Config = BIG, **options: Any
) -> tuple[nn.Module, dict[str, Tensor], Program]:
    model, batch = build(config, batch=12)
    plan = Plan(Mesh.parse(mesh), microbatches, **options)
    return model, batch, autopar.compile_offline(model, batch, plan, cluster=PLAIN)


def prove(model: nn.Module, batch: dict[str, Tensor], program: Program) -> Proof:
    return prove_program(program, model, batch, Case(model, batch).trace())


def run_full_size(
    model: nn.Module, batch: dict[str, Tensor], program: Program
) -> tuple[CutShort, ...]:
    return check_full_size(program, Case(model, batch).trace())


def changed(text: str, old: str, new: str) -> str:
    """With the last place of `old` changed."""
    before, found, after = text.rpartition(old)
    assert found, old
    return before + new + after
