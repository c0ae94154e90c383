"""Every schedule computes what the untouched model computes, on a virtual mesh."""

from __future__ import annotations

from typing import Any

import pytest
from models import Block, Case, Stack, gpt2, llama, plain_gpt, randomize, token_batch
from torch import Tensor, nn

from passes.schedule import ScheduleError

LOOPED = ["interleaved", "looped-bfs"]


@pytest.mark.parametrize("schedule", LOOPED)
@pytest.mark.parametrize(
    ("mesh", "microbatches", "stages_per_rank"),
    [("pp=2,tp=2", 4, 2), ("pp=2,dp=2", 2, 2), ("pp=2", 1, 3), ("pp=3", 4, 2)],
)
def test_stages_in_rounds(schedule, mesh, microbatches, stages_per_rank):
    case = plain_gpt(layers=6).double()
    options = {"schedule": schedule, "stages_per_rank": stages_per_rank}
    case.verify(mesh, microbatches, **options)


@pytest.mark.parametrize("schedule", LOOPED)
@pytest.mark.parametrize("build", [gpt2, llama])
def test_hugging_face_models_in_rounds(schedule, build):
    case = build(padded=True).double()
    case.verify("pp=2,tp=2", 4, schedule=schedule, stages_per_rank=2)


def test_in_rounds_with_dropout_and_recomputation():
    case = plain_gpt(dropout=0.1).double()
    options = {"schedule": "interleaved", "stages_per_rank": 2, "recompute": "full"}
    case.verify("pp=2", 4, **options)


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


def test_a_schedule_that_does_not_fit_is_refused_before_the_work_begins():
    with pytest.raises(ScheduleError, match="two or more stages a rank, not 1"):
        plain_gpt().compile("pp=2", 2, schedule="interleaved")
