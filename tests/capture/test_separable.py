"""Microbatches: either they share the loss out, or they are refused with the line.

Gradients are added up over microbatches. So whatever a loss does with samples, the
result is that of the whole batch, or an error says which op takes samples together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, Stack, plain_gpt, randomize, token_batch
from torch import Tensor, nn

from autopar.passes.errors import BatchError, LossNotSeparable

Batch = Mapping[str, Tensor]


def scores(logits: Tensor) -> Tensor:
    """One number a sample: logits [b, s, v] -> [b]."""
    return logits.square().mean((1, 2))


def pairs_in_turn(logits: Tensor, batch: Batch) -> Tensor:
    r = scores(logits)
    return -F.logsigmoid(r[0::2] - r[1::2]).mean()


def pairs_of_halves(logits: Tensor, batch: Batch) -> Tensor:
    chosen, rejected = scores(logits).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def pairs_by_view(logits: Tensor, batch: Batch) -> Tensor:
    r = scores(logits).view(-1, 2)
    return F.softplus(r[:, 1] - r[:, 0]).sum()


def neighbours(logits: Tensor, batch: Batch) -> Tensor:
    r = scores(logits)
    return (r[1:] - r[:-1]).square().mean()


def one_sample(logits: Tensor, batch: Batch) -> Tensor:
    return scores(logits)[3] * 1.0


def in_batch_negatives(logits: Tensor, batch: Batch) -> Tensor:
    a, b = F.normalize(logits.mean(1), dim=-1).chunk(2)
    return F.cross_entropy(a @ b.T / 0.05, torch.arange(len(a)))


def chunks_of_tokens(logits: Tensor, batch: Batch) -> Tensor:
    rows, labels = logits.flatten(0, 1), batch["labels"].flatten()
    parts = zip(rows.chunk(4), labels.chunk(4), strict=True)
    total = sum(F.cross_entropy(x, y, reduction="sum") for x, y in parts)
    return total / (labels != -100).sum()


def turned_round(logits: Tensor, batch: Batch) -> Tensor:
    r = scores(logits)
    return (r * r.flip(0)).mean()


def rolled(logits: Tensor, batch: Batch) -> Tensor:
    r = scores(logits)
    return (r - r.roll(1, 0)).square().mean()


def ranked(logits: Tensor, batch: Batch) -> Tensor:
    r = scores(logits).sort().values
    return (r * torch.arange(len(r))).mean()


def running(logits: Tensor, batch: Batch) -> Tensor:
    return scores(logits).cumsum(0).square().mean()


def hardest(logits: Tensor, batch: Batch) -> Tensor:
    return scores(logits).topk(2).values.sum()


def whitened(logits: Tensor, batch: Batch) -> Tensor:
    r = scores(logits)
    return ((r - r.mean()) / (r.std() + 1e-3)).pow(4).mean()


def one_by_one(logits: Tensor, batch: Batch) -> Tensor:
    return torch.stack([x.square().mean() for x in logits]).mean()


def of_labels_turned_round(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flip(0).flatten())


def of_a_penalty_alone(logits: Tensor, batch: Batch) -> Tensor:
    return logits.sum() * 0.0 + batch["labels"].double().std()


LOSSES = [
    pairs_in_turn,
    pairs_of_halves,
    pairs_by_view,
    neighbours,
    one_sample,
    in_batch_negatives,
    chunks_of_tokens,
    turned_round,
    rolled,
    ranked,
    running,
    hardest,
    whitened,
    one_by_one,
    of_labels_turned_round,
    of_a_penalty_alone,
]


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_a_loss_that_mixes_samples_is_right_or_refused(loss_fn):
    model = randomize(Stack(layers=1))
    case = Case(model, token_batch(seq=4, ignored="none"), loss_fn).double()
    case.verify("dp=2,tp=2")
    for mesh, microbatches in (("dp=1", 2), ("dp=2", 2), ("pp=2", 8)):
        right_or_refused(case, mesh, microbatches)


def right_or_refused(case: Case, mesh: str, microbatches: int) -> None:
    try:
        case.verify(mesh, microbatches)
    except BatchError as error:
        assert "of which 2 go together" in error.message
    except LossNotSeparable as error:
        assert error.source.startswith("test_separable.py:")
        assert "microbatches=1" in error.fix


def test_pairs_of_samples_are_shared_out_as_pairs():
    model = randomize(Stack(layers=1))
    case = Case(model, token_batch(seq=4, ignored="none"), pairs_in_turn).double()
    case.verify("dp=2", 2)
    with pytest.raises(BatchError, match="of which 2 go together"):
        case.compile("dp=1", 8)


class Mixing(nn.Module):
    """A model whose layer takes samples together, as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.own = nn.Parameter(torch.randn(8, 1, WIDTH))
        self.how = how

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(WAYS[self.how](self.embed(input_ids) + self.own))


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "a parameter of each sample": lambda x: x,
    "attention over samples": lambda x: torch.softmax(
        torch.einsum("bse,cse->bcs", x, x), 1
    ).sum(1, keepdim=True).transpose(1, 2) * x,
    "a mean over samples": lambda x: x - x.mean(0),
    "samples in another order": lambda x: x + x[torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])],
    "samples as features": lambda x: x.transpose(0, 1).reshape(4, -1).view(4, 8, -1)
    .transpose(0, 1),
}  # fmt: skip


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("how", WAYS)
def test_a_model_that_mixes_samples_is_right_or_refused(how):
    torch.manual_seed(0)
    case = Case(
        Mixing(how), token_batch(seq=4, ignored="none"), mean_of_tokens
    ).double()
    case.verify("dp=2")
    right_or_refused(case, "dp=2", 2)


def mean_of_tokens(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("mesh", ["dp=1", "pp=2", "tp=2"])
def test_a_batch_of_one_sample_has_nothing_to_share_out(mesh):
    case = plain_gpt(layers=2, batch=1, ignored="none").double()
    case.verify(mesh)
    with pytest.raises(BatchError, match=r"first dim .* is 1 .*\n  fix  use microb"):
        case.compile(mesh, 2)


class OneByOne(nn.Module):
    """A model that is called for each sample, and not alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        return torch.stack(
            [self.head(self.embed(x).tanh()) / (1 + i) for i, x in enumerate(input_ids)]
        )


def test_a_loop_over_samples_is_named() -> None:
    batch = token_batch(seq=4, ignored="none")
    case = Case(randomize(OneByOne()), batch, mean_of_tokens).double()
    line = inspect.getsourcelines(OneByOne.forward)[1] + 2
    with pytest.raises(LossNotSeparable, match="all samples of %input_ids") as refused:
        case.compile("dp=1", 2)
    assert refused.value.source == f"test_separable.py:{line}"
    (note,) = case.proved("dp=2").remarks
    assert f"needs all at once at test_separable.py:{line}" in note
