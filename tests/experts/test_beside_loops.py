"""Loops over experts beside the one step that each became, where the model itself is
not run: it has no weights, or too many."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from loops_of_experts import BATCHED
from loops_of_numbers import PRESENT
from losses_of_rows import of_all
from models_of_rows import case, copies, in_place, of_samples, one_hot, scattered
from torch import Tensor, nn

import autopar
from autopar.capture.capture_model import capture_model
from autopar.options import make_plan
from autopar.passes.graph import Node
from autopar.passes.proof_record import Beside, Loops
from autopar.passes.traced import Traced
from autopar.proof.beside_loops import compare_loops
from autopar.proof.ranks import VerificationFailed

WIDTH, HIDDEN, EXPERTS, CHOSEN, CLASSES = 40, 96, 12, 3, 200
LOOPS = (in_place, one_hot, copies, of_samples, scattered, *BATCHED, *PRESENT)


class Experts(nn.Module):
    """More of them than numbers that are counts anyhow."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(CHOSEN, dim=-1)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            row, place = torch.where(chosen == e)
            y.index_add_(0, row, expert(flat[row]) * weight[row, place, None])
        return x + y.view_as(x)


class Mixture(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def on_meta(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        model = Mixture(layers)
    ids = torch.zeros(16, 64, dtype=torch.long)
    return model, {"ids": ids, "labels": ids}


@cache
def captured_loops() -> tuple[Traced, ...]:
    return capture_model(*on_meta(layers=1)).loops or ()


def compared(traced: Traced) -> Loops:
    assert traced.loops
    return compare_loops(*traced.loops, {})


@pytest.mark.matrix(quick=6)
@pytest.mark.parametrize("add", LOOPS)
def test_one_step_computes_what_turns_do(add: Callable[..., Tensor]) -> None:
    made = compared(case(of_all, add).trace())
    assert made.compared > 10 and made.error < 1e-12, str(made)


@pytest.mark.slow
def test_a_model_without_weights_is_compared() -> None:
    model, batch = on_meta(layers=2)
    program = autopar.compile_offline(model, batch, make_plan("ep=2"), prove=True)
    proof = program.proof
    assert proof and proof.passed
    assert "no weights" in str(proof) and "experts as one step: " in str(proof)
    assert proof.model.loops.compared > 3 * EXPERTS and proof.model.loops.error < 1e-12


# --- mutants --------------------------------------------------------------------------


def of_op(op: str) -> Callable[[Node], Node]:
    return lambda node: replace(node, op=op)


MUTANTS: dict[str, Callable[[Node], Node]] = {
    "aten.stack": lambda node: node.with_args(tensors=node.arg("tensors")[::-1]),
    "aten.mul": lambda node: node.with_args(other=node.arg("self")),
    "aten.add": of_op("aten.sub.Tensor"),
    "aten.silu": of_op("aten.relu.default"),
    "aten.sum": of_op("aten.amax.default"),
    "aten.topk": lambda node: node.with_args(largest=False),
}


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("name", MUTANTS)
def test_one_step_that_computes_another_thing_is_refused(name: str) -> None:
    looped, batched = captured_loops()
    nodes = list(batched.graph.nodes)
    at = next(i for i, node in enumerate(nodes) if node.name == name)
    nodes[at] = MUTANTS[name](nodes[at])
    wrong = replace(batched, graph=replace(batched.graph, nodes=tuple(nodes)))
    with pytest.raises(VerificationFailed, match="computes something else") as refused:
        compare_loops(looped, wrong, {})
    line = inspect.getsource(Experts).partition("row, place")[0].count("\n")
    line += inspect.getsourcelines(Experts)[1]
    assert refused.value.source == f"test_beside_loops.py:{line}"


def test_what_cannot_be_compared_is_told() -> None:
    why = Loops(why="no small sizes stand for 3 and 4 together")
    assert str(Beside(loops=why)).endswith("experts not compared: " + why.why)
