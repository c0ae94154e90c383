"""Activation checkpoints of a model: those of layers are the plan's to decide, others
are as the model has them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, Block, randomize, token_batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.passes.program import Program
from examples.benchmarks.live_bytes import LiveBytes

CHUNKS, SEQ, LARGE = 8, 64, 2048
LOGITS = 4 * SEQ * LARGE * 4  # bytes of all
OTHERS = (CHUNKS - 1) / CHUNKS * LOGITS  # of all chunks but one
Run = Callable[..., Any]


def at_once(function: Run, *args: Any) -> Any:
    return function(*args)


AGAIN: dict[str, Run] = {
    "no": at_once,
    "reentrant": partial(checkpoint, use_reentrant=True),
    "other": partial(checkpoint, use_reentrant=False),
}


class Chunked(nn.Module):
    """The loss is by chunks of positions, or of all rows."""

    def __init__(self, run: Run, rows: bool = False, vocab: int = LARGE) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab)
        self.run, self.rows = run, rows

    def nll(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x).flatten(0, -2)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")

    def cut(self, x: Tensor) -> Sequence[Tensor]:
        return x.flatten(0, 1).chunk(CHUNKS) if self.rows else x.chunk(CHUNKS, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        chunks = zip(self.cut(self.norm(x)), self.cut(labels), strict=True)
        return sum(self.run(self.nll, *own) for own in chunks) / labels.numel()


def chunked(run: str, rows: bool = False) -> Case:
    batch = token_batch(batch=4, seq=SEQ, vocab=LARGE)
    return Case(randomize(Chunked(AGAIN[run], rows)), batch)


def peak_of_a_step(case: Case, program: Program) -> int:
    step = case.step(program)
    step(**case.batch)
    with LiveBytes() as live:
        before = live.now
        step(**case.batch)
    return live.peak - before


@pytest.mark.slow
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("run", ["reentrant", "other"])
def test_of_checkpointed_chunks_one_is_alive(run: str, rows: bool) -> None:
    """The logits of all others, which are kept where nothing is checkpointed, are not
    there beside it."""
    whole, chunk = chunked("no", rows), chunked(run, rows)
    programs = [case.compile("tp=1") for case in (whole, chunk)]
    kept, again = map(peak_of_a_step, (whole, chunk), programs)
    assert OTHERS >= kept - again > 0.8 * OTHERS
    first, other = (program.memory[0].activations for program in programs)
    assert kept - again == pytest.approx(first - other, rel=0.1)


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2,tp=2", {"zero": 3}),
        ("pp=2", {"schedule": "zb-h1", "recompute": "selective"}),
        ("cp=2", {"recompute": "elementwise"}),
        ("dp=2,tp=2", {"recompute": "full", "zero": 1}),
        ("pp=2", {"schedule": "gpipe", "recompute": "auto", "memory": 10_000_000}),
    ],
)
def test_chunks_that_are_computed_again_are_the_models(mesh, options, rows) -> None:
    chunked("other", rows).double().verify(mesh, 2, **options)


def test_a_plan_may_keep_what_a_checkpoint_makes() -> None:
    case = chunked("other")
    again = case.compile("tp=1").memory[0].activations
    layers = {f"checkpoint.{i}": "none" for i in range(CHUNKS)}
    kept = case.compile("tp=1", recompute_layers=layers).memory[0].activations
    assert OTHERS >= kept - again > 0.8 * OTHERS


class CheckpointedLayers(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x.square().mean()


@pytest.mark.parametrize("run", ["reentrant", "other"])
def test_checkpoints_of_layers_are_the_plans_to_decide(run: str) -> None:
    batch = {"x": torch.randn(4, 8, WIDTH)}
    own, plain = (Case(CheckpointedLayers(AGAIN[how]), batch) for how in (run, "no"))
    for recompute in ("none", "full"):
        texts = [case.compile("tp=1", recompute=recompute) for case in (own, plain)]
        assert texts[0].memory == texts[1].memory


# --- checkpoints anywhere ----------------------------------------------------------


class Anywhere(nn.Module):
    """Checkpoints are around parts that are drawn, some within others."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.first, self.second = Block(), Block()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.drop = nn.Dropout(draw.choice([0.0, 0.2]))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.runs = [draw.choice(list(AGAIN.values())) for _ in range(10)]
        self.chunks = draw.choice([1, 2, 4])

    def body(self, x: Tensor) -> Tensor:
        x = self.runs[0](self.first, x)
        for block, run in zip(self.blocks, self.runs[1:3], strict=True):
            x = run(block, x)
        return self.runs[3](lambda x: x + self.drop(self.runs[4](self.second, x)), x)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.runs[5](self.norm, x)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.runs[6](self.body, self.runs[7](self.embed, input_ids))
        cuts = zip(x.chunk(self.chunks, 1), labels.chunk(self.chunks, 1), strict=True)
        return sum(self.runs[8 + i % 2](self.loss, *own) for i, own in enumerate(cuts))


PLANS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tp=1", {"recompute": "full"}),
    ("dp=2", {"zero": 3}),
    ("dp=2,tp=2", {"zero": 2, "recompute": "selective"}),
    ("pp=2", {}),
    ("pp=2", {"schedule": "zb-h1", "recompute": "full"}),
    ("pp=2", {"schedule": "interleaved", "stages_per_rank": 2}),
    ("tp=2", {"sequence_parallel": False}),
)


@pytest.mark.matrix(quick=3, daily=14)
@pytest.mark.parametrize("seed", range(70))
def test_checkpoints_anywhere_change_no_number(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    mesh, options = PLANS[seed % len(PLANS)]
    case = Case(randomize(Anywhere(draw)), token_batch(ignored="some")).double()
    case.verify(mesh, draw.choice([1, 2]), **options)
