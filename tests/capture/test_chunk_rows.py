"""Chunks of rows, as of a loss that does not have all logits at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from drawn_losses import LOSSES
from models import VOCAB, Stack, randomize, token_batch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autopar.compiler import compile_offline
from autopar.options import make_plan
from autopar.passes.errors import LossNotSeparable
from autopar.passes.proof_record import SMALL

Batch = Mapping[str, Tensor]
LossFn = Callable[[Tensor, Batch], Tensor]
CHUNKS = 4


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def in_slices(x: Tensor) -> list[Tensor]:
    size = -(-len(x) // CHUNKS)
    return [x[i : i + size] for i in range(0, len(x), size)]


CUTS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "chunk": lambda x: x.chunk(CHUNKS),
    "split": lambda x: x.split(len(x) // CHUNKS + 1),
    "tensor_split": lambda x: x.tensor_split(CHUNKS),
    "slices": in_slices,
}
SUMS: dict[str, Callable[[Sequence[tuple[Tensor, Tensor]]], Tensor]] = {
    "sum": lambda chunks: sum((nll(x, y) for x, y in chunks), torch.tensor(0.0)),
    "list": lambda chunks: torch.stack([nll(x, y) for x, y in chunks]).mean(),
    "again": lambda chunks: sum(
        (checkpoint(nll, x, y, use_reentrant=False) for x, y in chunks),
        torch.tensor(0.0),
    ),
    "joined": lambda chunks: torch.cat(
        [F.cross_entropy(x, y, reduction="none") for x, y in chunks]
    ).sum(),
    "both": lambda chunks: (
        sum(nll(x, y) for x, y in chunks)
        + 1e-3 * sum(x.logsumexp(-1).square().sum() for x, _ in chunks)
    ),
    "scaled": lambda chunks: sum(nll(x / 2, y) / len(chunks) for x, y in chunks),
}


def by_chunks(cut: str, total: str, shifted: bool) -> LossFn:
    def loss_fn(logits: Tensor, batch: Batch) -> Tensor:
        labels = batch["labels"]
        if shifted:  # then no chunk has as many positions as another
            logits, labels = logits[:, :-1], labels[:, 1:]
        rows, of_rows = logits.reshape(-1, VOCAB), labels.reshape(-1)
        chunks = zip(CUTS[cut](rows), CUTS[cut](of_rows), strict=True)
        return SUMS[total](list(chunks)) / (labels != -100).sum()

    return loss_fn


def case_of(loss_fn: LossFn, seq: int = 8) -> Case:
    model = randomize(Stack(layers=2))
    return Case(model, token_batch(seq=seq, ignored="some"), loss_fn).double()


@pytest.mark.matrix(quick=4, daily=24)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("total", SUMS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("mesh", "microbatches"), [("dp=2,tp=2", 2), ("pp=2", 4), ("cp=2", 2)]
)
def test_which_chunk_a_row_was_in_does_not_matter(
    cut, total, shifted, mesh, microbatches
) -> None:
    if mesh == "cp=2" and shifted:
        mesh = "tp=2"
    case_of(by_chunks(cut, total, shifted)).verify(mesh, microbatches)


def test_ranks_have_the_chunks_of_their_own_samples() -> None:
    """Not all of them each: nobody sends hidden states."""
    program = case_of(by_chunks("chunk", "sum", False)).compile("dp=2", zero=0)
    assert {c.kind for c in program.communication} <= {"all_reduce"}


def test_ranks_of_cp_have_some_positions_of_each_chunk() -> None:
    """They send what they do for a loss of all logits at once."""
    chunked, whole = by_chunks("chunk", "sum", False), LOSSES["cross_entropy"]
    of = ((chunked, 1), (whole, CHUNKS), (whole, 1))
    sent = [
        case_of(loss_fn, seq=16).compile("cp=2", loss_chunks=n).communication
        for loss_fn, n in of
    ]
    assert sent[0] == sent[1] == sent[2]


def joined_positions(mean: bool, logits: Tensor, batch: Batch) -> Tensor:
    """The rows of three positions of all samples, and then those of the others."""
    labels = batch["labels"]
    rows = [
        F.cross_entropy(x.reshape(-1, VOCAB), y.reshape(-1), reduction="none")
        for x, y in zip(logits.split(3, 1), labels.split(3, 1), strict=True)
    ]
    joined = torch.cat(rows)
    return joined.mean() if mean else joined.sum() / (labels != -100).sum()


@pytest.mark.parametrize("mean", [False, True])
def test_rows_that_are_joined_by_position_are_shared_out(mean: bool) -> None:
    case = case_of(partial(joined_positions, mean))
    case.verify("pp=2", 4)
    kinds = {c.kind for c in case.compile("dp=2", 2, zero=0).communication}
    assert kinds <= {"all_reduce"}


def rows_of(logits: Tensor, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    rows, labels = logits.flatten(0, 1), batch["labels"].flatten()
    return list(zip(rows.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True))


MIXED: dict[str, LossFn] = {
    "means": lambda x, b: sum(F.cross_entropy(*c) for c in rows_of(x, b)),
    "weights": lambda x, b: sum((i + 1) * nll(*c) for i, c in enumerate(rows_of(x, b))),
    "all but one": lambda x, b: sum(nll(*c) for c in rows_of(x, b)[1:]),
    "one twice": lambda x, b: sum(nll(*c) for c in [*rows_of(x, b), rows_of(x, b)[0]]),
    "squares": lambda x, b: sum(nll(*c).square() for c in rows_of(x, b)),
    "largest": lambda x, b: sum(c.amax(0).sum() for c, _ in rows_of(x, b)),
    "running": lambda x, b: sum(c.cumsum(0).square().sum() for c, _ in rows_of(x, b)),
    "pairs": lambda x, b: sum(
        (c * rows_of(x, b)[0][0]).sum() for c, _ in rows_of(x, b)
    ),
    "turned": lambda x, b: nll(
        torch.cat([c for c, _ in rows_of(x, b)[::-1]]), b["labels"].flatten()
    ),
    "norms": lambda x, b: torch.stack([c.norm() for c, _ in rows_of(x, b)]).sum(),
    "largest sum": lambda x, b: torch.stack([nll(*c) for c in rows_of(x, b)]).max(),
    "by place": lambda x, b: sum(
        (c * torch.arange(len(c))[:, None]).sum() for c, _ in rows_of(x, b)
    ),
}


@pytest.mark.matrix(quick=6)
@pytest.mark.parametrize("name", MIXED)
def test_where_it_matters_samples_stay_in_their_chunks(name: str) -> None:
    case = case_of(MIXED[name])
    case.verify("dp=2")
    with pytest.raises(LossNotSeparable):
        case.compile("dp=1", 2)


@pytest.mark.matrix(quick=0, daily=1)
@pytest.mark.parametrize("shifted", [False, True])
def test_a_large_model_with_chunks_is_proved_small(shifted: bool) -> None:
    torch.manual_seed(0)
    model = randomize(Stack(layers=2))
    ids = torch.randint(VOCAB, (64, 4096))
    batch = {"input_ids": ids, "labels": ids.clone()}
    loss_fn = by_chunks("chunk", "sum", shifted)
    plan = make_plan("pp=2,tp=2", microbatches=4)
    program = compile_offline(model, batch, plan, loss_fn, prove=True)
    assert program.proof is not None and program.proof.size == SMALL
