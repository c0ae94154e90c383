"""A loss of which never all logits are there, by chunks of positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from cases import Case
from drawn_losses import LOSSES
from models import VOCAB, Block, Stack, plain_gpt, randomize, token_batch
from torch import Tensor, nn

from autopar.compiler import compile_offline
from autopar.options import make_plan
from autopar.passes.capture.normalize.chunk_loss import NotInChunks
from autopar.passes.proof_record import SMALL
from examples.benchmarks.live_bytes import LiveBytes

LossFn = Callable[[Tensor, Mapping[str, Any]], Tensor]


# Of one position alone, or by chunks already.
OTHERS = {"last", "pairs", "contrast", "chunked"}


def stack(loss_fn: LossFn, **batch: Any) -> Case:
    drawn = token_batch(ignored="some", **batch)
    samples, seq = drawn["labels"].shape
    drawn |= {"target": torch.randn(samples, seq, VOCAB)}
    drawn |= {"weights": torch.rand(samples, seq)}
    return Case(randomize(Stack(layers=2)), drawn, loss_fn).double()


PLANS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp=2,tp=2", {"zero": 3}),
    ("cp=2", {"recompute": "selective"}),
    ("pp=2", {"schedule": "zb-h1"}),
    ("tp=2", {"sequence_parallel": False}),
)


@pytest.mark.matrix(quick=4, daily=24)
@pytest.mark.parametrize("chunks", [2, 3, 8])
@pytest.mark.parametrize(("mesh", "options"), PLANS)
@pytest.mark.parametrize("name", sorted(LOSSES.keys() - OTHERS))
def test_a_loss_by_chunks_is_the_loss(name, mesh, options, chunks) -> None:
    stack(LOSSES[name]).verify(mesh, 2, loss_chunks=chunks, **options)


REFUSED: dict[str, tuple[LossFn, str]] = {
    "running": (lambda x, b: x.cumsum(1).square().mean(), "cumsum"),
    "over positions": (lambda x, b: x.softmax(1).square().mean(), "softmax"),
    "largest": (lambda x, b: x.amax((0, 1)).sum(), "amax"),
    "with their mean": (lambda x, b: (x - x.mean()).square().mean(), "sub"),
    "with a root": (lambda x, b: (x / x.square().sum().sqrt()).exp().mean(), "div"),
    "one position": (LOSSES["last"], "linear"),
    "by chunks already": (LOSSES["chunked"], "split"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_positions_is_refused(name: str) -> None:
    loss_fn, op = REFUSED[name]
    with pytest.raises(NotInChunks, match=op) as caught:
        stack(loss_fn).compile("tp=1", loss_chunks=2)
    assert ".py:" in caught.value.source


def test_more_chunks_than_positions_are_refused() -> None:
    case = stack(LOSSES["cross_entropy"], seq=8)
    with pytest.raises(NotInChunks, match="of 8 positions"):
        case.compile("tp=1", loss_chunks=9)
    case.verify("tp=1", loss_chunks=8)


class Plain(nn.Module):
    """Has no layers with a number, and a wider product than logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(VOCAB, 32), Block(), Block()
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.embed(input_ids))))


def test_a_product_after_which_nothing_mixes_positions_is_found() -> None:
    def squares(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
        return logits.square().mean()

    case = Case(randomize(Plain()), token_batch(), squares).double()
    case.verify("dp=2,tp=2", 2, loss_chunks=4)


@pytest.mark.slow
def test_logits_of_one_chunk_are_there() -> None:
    case = plain_gpt(layers=2, vocab=2048, seq=64)
    logits = 8 * 64 * 2048 * 4

    def peak_of_a_step(chunks: int) -> tuple[int, int]:
        program = case.compile("tp=1", loss_chunks=chunks)
        step = case.step(program)
        step(**case.batch)
        with LiveBytes() as live:
            before = live.now
            step(**case.batch)
        return live.peak - before, program.memory[0].activations

    (whole, said_whole), (some, said) = map(peak_of_a_step, (1, 8))
    assert whole - some > 0.7 * logits
    assert whole - some == pytest.approx(said_whole - said, rel=0.1)


@pytest.mark.matrix(quick=0, daily=1)
@pytest.mark.parametrize("shifted", [False, True])
def test_a_large_model_is_proved_small(shifted: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (64, 4096))
    batch = {"input_ids": ids, "labels": ids.clone()}
    loss_fn = LOSSES["shifted" if shifted else "cross_entropy"]
    plan = make_plan("pp=2,tp=2", microbatches=4, loss_chunks=16)
    model = randomize(Stack(layers=2))
    program = compile_offline(model, batch, plan, loss_fn=loss_fn, prove=True)
    assert program.proof is not None and program.proof.size == SMALL
