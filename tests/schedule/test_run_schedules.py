"""Every schedule computes what the untouched model computes, on a virtual mesh."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, run_all_ranks
from models import Block, Stack, gpt2, llama, plain_gpt, randomize, token_batch
from torch import Tensor, nn

from autopar.passes.mesh import Mesh
from autopar.passes.program import Program
from autopar.passes.schedule.schedule import ScheduleError

LOOPED = ["interleaved", "looped-bfs"]


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("schedule", LOOPED)
@pytest.mark.parametrize(
    ("mesh", "microbatches", "stages_per_rank"),
    [("pp=2,tp=2", 4, 2), ("pp=2,dp=2", 2, 2), ("pp=2", 1, 3), ("pp=3", 4, 2)],
)
def test_stages_in_rounds(schedule, mesh, microbatches, stages_per_rank):
    case = plain_gpt(layers=6).double()
    options = {"schedule": schedule, "stages_per_rank": stages_per_rank}
    case.verify(mesh, microbatches, **options)


@pytest.mark.matrix(quick=0)
@pytest.mark.parametrize("schedule", LOOPED)
@pytest.mark.parametrize("build", [gpt2, llama])
def test_hugging_face_models_in_rounds(schedule, build):
    case = build(padded=True).double()
    case.verify("pp=2,tp=2", 4, schedule=schedule, stages_per_rank=2)


def test_in_rounds_with_dropout_and_recomputation():
    case = plain_gpt(dropout=0.1).double()
    options = {"schedule": "interleaved", "stages_per_rank": 2, "recompute": "full"}
    case.verify("pp=2", 4, **options)


# --- backwards in halves -----------------------------------------------------------

HALVES = {"zb-h1": 1, "zb-h2": 1, "zb-v": 2}  # and stages a rank


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("schedule", HALVES)
@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [("pp=2,tp=2", 4), ("pp=2,dp=2", 2), ("pp=4", 3), ("tp=2", 2), ("pp=3", 8)],
)
def test_backwards_in_halves(schedule, mesh, microbatches):
    case = plain_gpt(layers=8, batch=24).double()
    options = {"schedule": schedule, "stages_per_rank": HALVES[schedule]}
    case.verify(mesh, microbatches, **options)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("schedule", HALVES)
@pytest.mark.parametrize("build", [gpt2, llama])
def test_hugging_face_models_in_halves(schedule, build):
    options = {"schedule": schedule, "stages_per_rank": HALVES[schedule]}
    build(padded=True).double().verify("pp=2,tp=2", 4, **options)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_in_halves_with_dropout_and_recomputation(policy):
    case = plain_gpt(dropout=0.1).double()
    case.verify("pp=2,tp=2", 4, schedule="zb-h1", recompute=policy)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"), [("zb-h1", 1), ("zb-v", 2), ("interleaved", 2)]
)
def test_with_parameters_shared_out(schedule, stages_per_rank, zero):
    options = {"schedule": schedule, "stages_per_rank": stages_per_rank, "zero": zero}
    plain_gpt(dropout=0.1).double().verify("pp=2,dp=2,tp=2", 2, **options)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_halves_change_no_bit(schedule):
    case = plain_gpt(dropout=0.1)
    whole = case.compile("pp=2,tp=2", 4)
    halves = case.compile("pp=2,tp=2", 4, schedule=schedule)
    loss, grads = run_all_ranks(whole, case.model, case.batch)
    loss_too, grads_too = run_all_ranks(halves, case.model, case.batch)
    assert torch.equal(loss, loss_too)
    assert all(torch.equal(grads[name], grads_too[name]) for name in grads)


def test_only_schedules_in_halves_have_their_text_in_halves():
    case = plain_gpt(layers=2)
    for schedule, split in (("1f1b", False), ("zb-h1", True)):
        for text in case.compile("pp=2", 2, schedule=schedule).modules.values():
            assert ("def backward(" in text) is not split
            assert ("def backward_input(" in text) is split


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("build", [plain_gpt, gpt2, llama])
@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,tp=2"])
@pytest.mark.usefixtures("unrolled")
def test_gradients_of_weights_are_in_the_weight_half(build, mesh):
    """All of them, on the first stage too, and half of the products of matrices."""
    for text in build().compile(mesh, 2, schedule="zb-h1").modules.values():
        first, _, second = text.partition("def backward_input(")[2].partition("\ndef ")
        assert 'g["' not in first.partition("\n")[2] and 'g["' in second
        products = sum(first.count(f"{name}(") for name in ("torch.matmul", "F.linear"))
        assert products == second.count("_weight_grad_(") > 4


# --- weights of several stages -----------------------------------------------------


class OneBlock(Stack):
    """One block, used at every depth: ids [b, s] -> logits [b, s, v]."""

    def __init__(self, layers: int) -> None:
        super().__init__(Block, 1)
        self.layers = layers

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        for _ in range(self.layers):
            x = self.blocks[0](x)
        return self.head(x)


def flat_loss(logits: Tensor, batch: Any) -> Tensor:
    labels = batch["labels"].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels)


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize(
    ("mesh", "stages_per_rank", "holders"), [("pp=1", 4, {0}), ("pp=2", 2, {0, 1})]
)
def test_a_weight_of_several_stages_of_a_rank_is_counted_once(
    mesh, stages_per_rank, holders
):
    """Each stage of a rank adds to one gradient, which ranks then add up once."""
    case = Case(randomize(OneBlock(4)), token_batch(), flat_loss).double()
    options = {"schedule": "interleaved", "stages_per_rank": stages_per_rank}
    program = case.compile(mesh, 2, **options)
    weight = program.parameters["blocks.0.up.weight"]
    held_by = [program.schedule.stage_to_rank[s] for s in weight.stages]
    assert len(held_by) > len(set(held_by)) and set(held_by) == holders
    assert program.gradient_ranks("blocks.0.up.weight", 0) == tuple(sorted(holders))
    case.verify(mesh, 2, **options)


def on_mesh(program: Program, mesh: str) -> Program:
    """The program as if it were compiled for more ranks: what it says of them alone."""
    return replace(program, plan=replace(program.plan, mesh=Mesh.parse(mesh)))


def test_ranks_that_sum_a_gradient_are_a_group() -> None:
    tied = gpt2().compile("pp=2,dp=2,tp=2", 2)
    for program in (tied, on_mesh(tied, "pp=2,tp=3,dp=2")):
        each = {
            program.gradient_ranks(name, rank)
            for name, spec in program.parameters.items()
            for rank in range(program.mesh.size)
            if set(program.stages_of(rank)) & set(spec.stages)
        } | {tuple(range(program.mesh.size))}
        assert program.reduction_groups() == sorted(g for g in each if len(g) > 1)
    began = time.process_time()
    assert len(on_mesh(tied, "pp=2,dp=64,tp=8").reduction_groups()) > 16
    assert time.process_time() - began < 2


def test_a_schedule_that_does_not_fit_is_refused_before_the_work_begins():
    with pytest.raises(ScheduleError, match="two or more stages a rank, not 1"):
        plain_gpt().compile("pp=2", 2, schedule="interleaved")
