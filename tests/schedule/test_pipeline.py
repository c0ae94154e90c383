"""Losses of every form, frozen parameters, and models that cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, Stack, plain_gpt, randomize, token_batch
from torch import Tensor, nn

from autopar.passes.errors import BatchError, CaptureError, LossNotSeparable
from autopar.proof.differences import NORM

MESHES = ["pp=2,tp=2", "dp=2,tp=2"]
ONE_QUICK = [MESHES[0], pytest.param(MESHES[1], marks=pytest.mark.slow)]
Batch = Mapping[str, Tensor]


def cross_entropy(logits: Tensor, batch: Batch, **options: Any) -> Tensor:
    flat = logits.flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(*flat, **options)


def each_token(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """nll [b, s] of every token, and which of them count, as 0 or 1."""
    labels = batch["labels"]
    nll = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return nll, (labels != -100).to(logits.dtype)


def stack(loss_fn: Callable[..., Any], **batch: Any) -> Case:
    return Case(randomize(Stack()), token_batch(**batch), loss_fn)


# --- losses ------------------------------------------------------------------------


def summed(logits: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(logits, batch, reduction="sum")


def smoothed(logits: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(logits, batch, label_smoothing=0.1)


def mean_of_samples(logits: Tensor, batch: Batch) -> Tensor:
    labels = {"labels": batch["labels"].clamp(min=0)}
    nll = cross_entropy(logits, labels, reduction="none")
    return nll.view(batch["labels"].shape).mean()


def mean_of_means(logits: Tensor, batch: Batch) -> Tensor:
    nll, kept = each_token(logits, batch)
    return ((nll * kept).sum(1) / kept.sum(1).clamp(min=1)).mean()


def weighted(logits: Tensor, batch: Batch) -> Tensor:
    nll, kept = each_token(logits, batch)
    weight = kept / (1 + torch.arange(kept.shape[1]))
    return (nll * weight).sum() / weight.sum()


def from_log_softmax(logits: Tensor, batch: Batch) -> Tensor:
    log = F.log_softmax(logits, -1)
    return F.nll_loss(log.flatten(0, 1), batch["labels"].flatten())


def gathered(logits: Tensor, batch: Batch) -> Tensor:
    labels = batch["labels"]
    log = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])
    kept = labels != -100
    return -(log.squeeze(-1) * kept).sum() / kept.sum()


def soft_targets(logits: Tensor, batch: Batch) -> Tensor:
    hard = F.one_hot(batch["labels"].clamp(min=0), VOCAB).to(logits.dtype)
    return -((0.9 * hard + 0.1 / VOCAB) * logits.log_softmax(-1)).sum(-1).mean()


def with_z_loss(logits: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(logits, batch) + 0.01 * logits.logsumexp(-1).square().mean()


def with_largest_logit(logits: Tensor, batch: Batch) -> Tensor:
    """Its gradient goes to the largest of all logits, not of each rank's."""
    return cross_entropy(logits, batch) + 0.1 * logits.amax(-1).square().mean()


def in_pieces(logits: Tensor, batch: Batch) -> Tensor:
    pieces = zip(logits.chunk(4, 1), batch["labels"].chunk(4, 1), strict=True)
    total = sum(summed(x, {"labels": y}) for x, y in pieces)
    return total / (batch["labels"] != -100).sum()


def two_horizons(logits: Tensor, batch: Batch) -> Tensor:
    later = {"labels": batch["labels"][:, 2:]}
    return cross_entropy(logits, batch) / 2 + cross_entropy(logits[:, :-2], later) / 2


def capped(logits: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(30 * torch.tanh(logits / 30), batch)


LOSSES = [
    cross_entropy,
    summed,
    smoothed,
    mean_of_samples,
    mean_of_means,
    weighted,
    from_log_softmax,
    gathered,
    soft_targets,
    with_z_loss,
    with_largest_logit,
    in_pieces,
    two_horizons,
    capped,
]


@pytest.mark.matrix(quick=4, daily=10)
@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mesh", ONE_QUICK)
def test_a_loss_that_is_a_sum_over_samples(loss_fn, mesh):
    stack(loss_fn).double().verify(mesh, 2)


@pytest.mark.matrix(quick=0)
@pytest.mark.parametrize("microbatches", [4, 2, 1])
def test_a_penalty_on_weights_counts_once(microbatches):
    case = stack(cross_entropy)
    model = case.model

    def penalized(logits: Tensor, batch: Batch) -> Tensor:
        weights = model.head.weight.pow(2).sum() + model.embed.weight.abs().mean()
        return cross_entropy(logits, batch) + 1e-2 * weights

    case._replace(loss_fn=penalized).double().verify("dp=2,tp=2", microbatches)
    case._replace(loss_fn=penalized).double().verify("pp=2,tp=2", microbatches)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("form", ["pair", "dict", "auxiliary"])
def test_a_model_that_returns_its_own_loss(form):
    class WithLoss(Stack):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            x, each = self.embed(input_ids), 0
            for block in self.blocks:
                x = block(x)
                each = each + x.square().mean()
            logits = self.head(x)
            loss = cross_entropy(logits, {"labels": labels})
            if form == "auxiliary":
                return loss + 0.01 * each
            pair = {"logits": logits, "loss": loss}
            return pair if form == "dict" else tuple(pair.values())

    case = Case(randomize(WithLoss()), token_batch()).double()
    for mesh in MESHES:
        case.verify(mesh, 2)


# --- what is frozen ----------------------------------------------------------------

FROZEN: dict[str, Callable[[str], bool]] = {
    "the embedding": lambda name: name.startswith("embed"),
    "every other layer": lambda name: name.startswith(("blocks.0", "blocks.2")),
    "the first half": lambda name: name.startswith(("embed", "blocks.0", "blocks.1")),
    "all but the head": lambda name: not name.startswith("head"),
    "all but biases": lambda name: not name.endswith("bias"),
}


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("what", FROZEN)
@pytest.mark.parametrize("mesh", ONE_QUICK)
def test_frozen_parameters_get_no_gradient(what, mesh):
    case = stack(cross_entropy).double()
    for name, p in case.model.named_parameters():
        p.requires_grad_(not FROZEN[what](name))
    found = case.verify(mesh, 2)
    trained = {n for n, p in case.model.named_parameters() if p.requires_grad}
    assert set(found.errors) == trained | {"loss", NORM}


# --- what cannot be compiled -------------------------------------------------------


def logarithm(logits: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(logits, batch).log()


def ratio(logits: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(logits, batch) / logits.square().mean()


def contrastive(logits: Tensor, batch: Batch) -> Tensor:
    z = F.normalize(logits.mean(1), dim=-1)
    return F.cross_entropy(z @ z.T, torch.arange(z.shape[0]))


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("loss_fn", [contrastive, logarithm, ratio])
def test_a_loss_that_is_no_sum_over_samples(loss_fn):
    """One microbatch on any mesh is fine; several are refused."""
    case = stack(loss_fn).double()
    case.verify("dp=2,tp=2", 1)
    with pytest.raises(LossNotSeparable, match=r"\n  fix .* microbatches=1"):
        case.compile("tp=2", 2)


def test_what_mixes_samples_is_shown_with_its_line():
    class Centered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0, keepdim=True)

    case = Case(randomize(Stack(Centered)), token_batch(), cross_entropy).double()
    case.verify("dp=2", 1)
    with pytest.raises(LossNotSeparable, match=r"\n  at   test_pipeline\.py:\d+ "):
        case.compile("dp=2", 2)


def test_batch_norm_is_refused_in_training_and_runs_in_evaluation():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(x.transpose(1, 2)).transpose(1, 2)

    case = Case(randomize(Stack(Normed)), token_batch(), cross_entropy).double()
    with pytest.raises(CaptureError, match=r"blocks\.0\.norm\.running_mean"):
        case.compile("tp=2")
    case.model.eval()
    case.verify("pp=2,tp=2", 2)


@pytest.mark.parametrize(
    ("mesh", "microbatches"), [("dp=3", 1), ("tp=2", 3), ("dp=2,tp=2", 8), ("dp=8", 2)]
)
def test_a_batch_that_does_not_divide(mesh, microbatches):
    with pytest.raises(BatchError, match=r"batch of 8 samples .* does not divide"):
        plain_gpt(layers=1).compile(mesh, microbatches)


def pairwise(logits: Tensor, batch: Batch) -> Tensor:
    reward = logits[:, -1, 0]
    return -F.logsigmoid(reward[0::2] - reward[1::2]).mean()


def test_samples_that_go_together_are_not_parted():
    """Of 12 samples in pairs 3 microbatches have 4 each; 4 would have a pair and a
    half, though 4 divides 12."""
    case = Case(randomize(Stack(layers=1)), token_batch(batch=12), pairwise).double()
    case.verify("dp=2", 3)
    with pytest.raises(
        BatchError, match=r"12 samples .* of which 2 go together.*\n.* 8"
    ):
        case.compile("tp=2", 4)
