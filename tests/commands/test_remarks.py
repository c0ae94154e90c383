"""Notes: what tells that a right plan is a slow one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import Case
from models import cut_gpt, token_batch
from torch import Tensor, nn

from autopar.passes.program import Program
from examples.gpt import GPT, Config

BATCH = token_batch(4, 8)


def compiled(mesh: str, heads: int = 4, **options: Any) -> Program:
    config = Config(layers=2, width=32, heads=heads, context=8, vocab=101)
    batch = {"ids": BATCH["input_ids"], "labels": BATCH["labels"]}
    return Case(GPT(config), batch).compile(mesh, **options)


@pytest.mark.slow
def test_a_plan_that_splits_what_it_should_has_none() -> None:
    for mesh in ("tp=4", "pp=2,dp=2", "pp=2,dp=2,tp=2"):
        assert compiled(mesh).remarks == ()


def test_an_axis_with_more_ranks_than_heads() -> None:
    (note,) = compiled("tp=4", heads=2).remarks
    assert note.startswith("tp splits blocks.*.attention.qkv (gpt.py:")
    assert "with 2 heads on 4 ranks along 'seq' only" in note
    assert note.endswith(": its ranks all hold the weights; tp=2 would split them")


def test_without_sequence_parallelism_nothing_of_it_is_split() -> None:
    (note,) = compiled("tp=4", heads=2, sequence_parallel=False).remarks
    places = (
        "blocks.*.attention.qkv",
        "blocks.*.attention ",
        "blocks.*.attention.proj",
    )
    assert all(place in note for place in places)
    assert note.endswith(
        "with 2 heads on 4 ranks: its ranks all compute the same; tp=2 would split them"
    )


def test_of_a_weight_that_is_cut_the_pieces_are_named() -> None:
    """Its queries are split; whole are the key and the value that all heads read."""
    (note,) = cut_gpt().compile("tp=2").remarks
    places, _, rest = note.partition(" along ")
    assert rest == "'seq' only: its ranks all hold the weights"
    pieces = re.findall(r"blocks\.\*\.attention\.qkv(\S*) \(", places)
    assert pieces == ["[32:40]", "[40:48]"]


def test_an_axis_that_splits_nothing() -> None:
    assert compiled("tp=2", split={"tp": ()}).remarks == (
        "tp splits no matrix product: its ranks all compute the same",
    )


class Contrasted(nn.Module):
    """Samples are compared with each other, in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.up = nn.Embedding(101, 32), nn.Linear(32, 64)
        self.down = nn.Linear(64, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.up(self.emb(input_ids)))).mean(1)
        return torch.logsumexp(x @ x.t(), -1).mean()


def test_one_row_of_packed_documents_is_one_sample() -> None:
    config = Config(layers=2, width=32, heads=4, context=8, vocab=101)
    batch = {"ids": BATCH["input_ids"][:1], "labels": BATCH["labels"][:1]}
    case = Case(GPT(config), batch).double()
    (note,) = case.compile("dp=2").remarks
    assert note.startswith("dp splits no samples") and "an axis cp" in note
    for mesh in ("dp=2", "cp=2"):
        case.verify(mesh)
    assert case.compile("cp=2").remarks == ()


def test_products_outside_of_modules_are_not_called_the_model() -> None:
    """Which may be split as it should."""
    case = Case(Contrasted(), {"input_ids": BATCH["input_ids"]})
    (note,) = case.compile("tp=2").remarks
    assert note.startswith("tp does not split products of the model itself (")


class Turned(nn.Module):
    """Uses an op without a rule in each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(101, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(input_ids)
        for layer in self.layers:
            x = layer(x).flip(-1)
        return torch.nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten() % 32)


def test_an_op_without_a_rule_is_told_once() -> None:
    (note,) = Case(Turned(), BATCH).compile("dp=2").remarks
    assert note.startswith("aten.flip: no rule; found by trial that 'batch', 'seq' may")
    assert "(test_remarks.py:" in note
