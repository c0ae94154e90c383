"""Losses that go over the samples of a batch one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from draw_options import outcome
from draw_sample_loops import SHARING, draw
from models import VOCAB, Block, Stack, randomize, token_batch
from torch import Tensor, nn

from autopar.compiler import compile_offline
from autopar.options import make_plan
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.errors import LossNotSeparable
from autopar.passes.proof_record import SMALL

Batch = Mapping[str, Tensor]
LossFn = Callable[[Tensor, Batch], Tensor]
MORE = 200


def selected(logits: Tensor, ids: Tensor) -> Tensor:
    """The logarithm of what each token is found probable: a sample at a time, as where
    the vocabulary is large."""
    rows = []
    for x, index in zip(logits, ids, strict=True):
        rows.append(x.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def over_sums(logits: Tensor, ids: Tensor) -> Tensor:
    """The same of a sum for each sample, as numbers of high precision have it."""
    found = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return found - torch.stack([torch.logsumexp(x, dim=-1) for x in logits])


def means(logits: Tensor, batch: Batch) -> Tensor:
    total = 0.0
    for i in range(len(logits)):
        total = total + F.cross_entropy(logits[i, :-1], batch["labels"][i, 1:])
    return total / len(logits)


def probable(logits: Tensor, batch: Batch) -> Tensor:
    return -selected(logits, batch["input_ids"]).mean()


def probable_by_sums(logits: Tensor, batch: Batch) -> Tensor:
    return -over_sums(logits, batch["input_ids"]).mean()


def masked(logits: Tensor, batch: Batch) -> Tensor:
    losses = []
    for x, y in zip(logits, batch["labels"], strict=True):
        kept = y != -100
        found = x.log_softmax(-1).gather(1, y.clamp(min=0)[:, None])[:, 0]
        losses.append(-found[kept].sum() / kept.sum().clamp(min=1))
    return torch.stack(losses).mean()


def clipped(logits: Tensor, batch: Batch) -> Tensor:
    """Ratios of policies, weighed by the advantage of a sample."""
    found = selected(logits, batch["input_ids"])
    total = torch.zeros((), dtype=logits.dtype)
    for i in range(found.shape[0]):
        ratio = (found[i] - found[i].detach()).exp()
        bounded = ratio.clamp(0.8, 1.2)
        gain = torch.min(ratio * batch["gains"][i], bounded * batch["gains"][i])
        total -= gain.mean()
    return total / found.shape[0]


def written(logits: Tensor, batch: Batch) -> Tensor:
    scores = torch.empty(len(logits), dtype=logits.dtype)
    for i, x in enumerate(logits):
        scores[i] = F.cross_entropy(x, batch["labels"][i])
    return (scores * batch["gains"]).sum()


def joined(logits: Tensor, batch: Batch) -> Tensor:
    pieces = zip(logits.split(1), batch["labels"].split(1), strict=True)
    return torch.cat(
        [F.cross_entropy(x[0], y[0], reduction="none") for x, y in pieces]
    ).mean()


LOSSES = (
    *(means, probable, probable_by_sums, masked, clipped, written, joined),
)  # fmt: skip


def case(loss_fn: LossFn, samples: int = 8) -> Case:
    torch.manual_seed(0)
    model = randomize(Stack(Block, 2))
    batch = dict(token_batch(samples, 8, ignored="some"))
    if loss_fn in (clipped, written):
        batch["gains"] = torch.randn(samples)
    return Case(model, batch, loss_fn).double()


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize(
    ("mesh", "microbatches"), [("dp=2,tp=2", 2), ("pp=2", 4), ("tp=1", 8)]
)
def test_samples_are_shared_out_whatever_goes_over_them(
    mesh, microbatches, loss_fn
) -> None:
    case(loss_fn).verify(mesh, microbatches)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_ranks_have_their_own_samples_and_no_others(loss_fn) -> None:
    program = case(loss_fn).compile("dp=2", zero=0)
    assert {c.kind for c in program.communication} <= {"all_reduce"}


def test_a_loop_is_as_long_as_one_turn() -> None:
    """Normalised, for any number of samples."""
    few, many = (len(normalize(case(means, n).trace()).graph.nodes) for n in (3, 8))
    assert few == many


class OneByOne(nn.Module):
    """A model that is called for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.norm, self.gate = nn.LayerNorm(8), nn.Parameter(torch.randn(8))

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = []
        for ids in input_ids:
            x = self.norm(self.embed(ids))
            x = F.silu(x @ x.mT) @ x + x.mean(0) * self.gate
            rows.append(self.head(x))
        return torch.stack(rows)


@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=2", 2), ("tp=2", 4)])
def test_a_model_may_be_called_for_each_sample(mesh, microbatches) -> None:
    torch.manual_seed(0)
    batch = dict(token_batch(8, 4, ignored="none"))
    Case(randomize(OneByOne()), batch, means).double().verify(mesh, microbatches)


class Preferences(nn.Module):
    """Two answers to each prompt, in one batch for the model."""

    def __init__(self, loop: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loop = randomize(Stack(Block, 1)), loop

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        ids = torch.cat([chosen, rejected])
        return self.loop(self.model(ids), ids)


def by_pairs(logits: Tensor, ids: Tensor) -> Tensor:
    pairs, losses = len(ids) // 2, []
    for i in range(pairs):
        better = F.cross_entropy(logits[i], ids[i])
        worse = F.cross_entropy(logits[i + pairs], ids[i + pairs])
        losses.append(F.softplus(better - worse))
    return torch.stack(losses).mean()


def by_answers(logits: Tensor, ids: Tensor) -> Tensor:
    scores = torch.stack([found.sum() for found in selected(logits, ids)])
    better, worse = scores.chunk(2)
    return -F.logsigmoid(better - worse).mean()


def by_halves(logits: Tensor, ids: Tensor) -> Tensor:
    pairs, kept = len(ids) // 2, []
    for i in range(len(ids)):
        x, y = logits[i : i + 1].mT, ids[i : i + 1]
        kept.append(F.cross_entropy(x, y, reduction="none"))
    scores = torch.cat(kept).mean(1)
    return F.softplus(scores[:pairs] - scores[pairs:]).sum()


@pytest.mark.parametrize("loop", [by_pairs, by_answers, by_halves])
def test_pairs_stay_together(loop) -> None:
    torch.manual_seed(0)
    chosen, rejected = torch.randint(VOCAB, (2, 4, 6))
    of = Case(Preferences(loop), {"chosen": chosen, "rejected": rejected})
    of.double().verify("dp=2", 2)


def twos(x: Tensor, batch: Batch) -> Tensor:
    return sum(F.cross_entropy(x[i], batch["input_ids"][i]) for i in (0, 1))


def turned(x: Tensor, batch: Batch) -> Tensor:
    rows = torch.stack([row.square() for row in x.flip(0)])
    return (rows[0] * x).mean()


MIXED: dict[str, LossFn] = {
    "two of them": twos,
    "turned": turned,
    "weights": lambda x, b: sum((i + 1) * row.exp().mean() for i, row in enumerate(x)),
    "after another": lambda x, b: sum(
        (x[i] * x[i - 1].detach()).mean() for i in range(len(x))
    ),
    "twice": lambda x, b: sum(row.exp().mean() for row in [*x, x[0]]),
    "largest": lambda x, b: torch.stack([row.exp().mean() for row in x]).max(),
    "chosen": lambda x, b: torch.stack([row.topk(2)[0].sum() for row in x]).mean(),
    "drawn": lambda x, b: torch.stack([F.dropout(row).sum() for row in x]).mean(),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_is_not_alike_stays_as_it_is(name) -> None:
    of = case(MIXED[name])
    of.verify("dp=2")
    with pytest.raises(LossNotSeparable):
        of.compile("dp=1", 2)


@pytest.mark.nightly
def test_a_large_model_is_proved_small() -> None:
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (32, 2048))
    batch = {"input_ids": ids, "labels": ids.clone()}
    model, plan = randomize(Stack(Block, 2)), make_plan("pp=2,tp=2", microbatches=4)
    program = compile_offline(model, batch, plan, means, prove=True)
    assert program.proof is not None and program.proof.size == SMALL


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 10, 15])
def test_draw(seed: int) -> None:
    assert outcome(draw(seed)) == "right"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(MORE))
def test_more_draws(seed: int) -> None:
    drawn = draw(seed)
    assert outcome(drawn) == "right" or drawn.mixed


def test_a_seed_gives_the_same_draw_each_time() -> None:
    assert [str(draw(i)) for i in range(9)] == [str(draw(i)) for i in range(9)]
    models = {str(draw(i).model) for i in range(0, 40, SHARING)}
    assert len(models) == 20
