"""Every loss of torch, in every reduction, is split over ranks and microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, Stack, randomize, token_batch
from torch import Tensor, nn

from autopar.passes.capture.normalize.loss import LOSS_RULES
from examples.gpt import GPT, Config

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")

BATCH, SEQ = 8, 16
MESHES = ("dp=2,tp=2", "pp=2,tp=2")
Loss = Callable[[Tensor, Mapping[str, Tensor], str], Tensor]


class Layer(nn.Module):
    """The smallest layer that there is something to split in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def fields() -> dict[str, Tensor]:
    """real, noise, signs and shares [b, s, v]; classes and sides (1 or -1) [b]."""
    draw = torch.Generator().manual_seed(2)
    real = torch.randn(BATCH, SEQ, VOCAB, generator=draw)
    return {
        "input_ids": token_batch(BATCH, SEQ)["input_ids"],
        "real": real,
        "signs": real.sign(),
        "shares": torch.rand(real.shape, generator=draw),
        "classes": torch.randint(VOCAB, (BATCH,), generator=draw),
        "sides": real[:, 0, 0].sign(),
    }


def case(loss: Callable[[Tensor, Mapping[str, Tensor]], Tensor]) -> Case:
    torch.manual_seed(0)
    return Case(randomize(Stack(Layer, 2)), fields(), loss).double()


def weights(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 2, VOCAB, dtype=x.dtype)


# What comes after the model's output x [b, s, v], the batch b and the reduction r.
LOSSES: dict[str, Loss] = {
    "mse": lambda x, b, r: F.mse_loss(x, b["real"], reduction=r),
    "weighed mse": lambda x, b, r: F.mse_loss(
        x, b["real"], reduction=r, weight=b["shares"]
    ),
    "mse of constants": lambda x, b, r: F.mse_loss(x, torch.zeros_like(x), reduction=r),
    "mse of two outputs": lambda x, b, r: F.mse_loss(x, x.roll(1, 2), reduction=r),
    "l1": lambda x, b, r: F.l1_loss(x, b["real"], reduction=r),
    "huber": lambda x, b, r: F.huber_loss(x, b["real"], reduction=r, delta=0.3),
    "smooth l1": lambda x, b, r: F.smooth_l1_loss(x, b["real"], reduction=r, beta=0.3),
    "soft margin": lambda x, b, r: F.soft_margin_loss(x, b["signs"], reduction=r),
    "hinge": lambda x, b, r: F.hinge_embedding_loss(x, b["signs"], 0.7, reduction=r),
    "poisson": lambda x, b, r: F.poisson_nll_loss(
        x, b["shares"], full=True, reduction=r
    ),
    "bce": lambda x, b, r: F.binary_cross_entropy(
        x.sigmoid(), b["shares"], weights(x), reduction=r
    ),
    "bce of logits": lambda x, b, r: F.binary_cross_entropy_with_logits(
        x, b["shares"], b["shares"], pos_weight=weights(x), reduction=r
    ),
    "kl": lambda x, b, r: F.kl_div(
        x.log_softmax(-1), b["real"].softmax(-1), reduction=r
    ),
    "margin ranking": lambda x, b, r: F.margin_ranking_loss(
        x[:, 0, 0], x[:, 0, 1], b["sides"], 0.1, reduction=r
    ),
    "cosine": lambda x, b, r: F.cosine_embedding_loss(
        x[:, 0], x[:, 1], b["sides"], 0.1, reduction=r
    ),
    "triplet": lambda x, b, r: F.triplet_margin_loss(
        x, b["real"], x.roll(1, 1), p=3, swap=True, reduction=r
    ),
    "triplet by distance": lambda x, b, r: F.triplet_margin_with_distance_loss(
        x[:, 0], x[:, 1], x[:, 2], reduction=r
    ),
    "multi margin": lambda x, b, r: F.multi_margin_loss(
        x[:, -1], b["classes"], weight=weights(x), reduction=r
    ),
    "multilabel": lambda x, b, r: F.multilabel_soft_margin_loss(
        x, b["shares"], weights(x), reduction=r
    ),
    "multilabel margin": lambda x, b, r: F.multilabel_margin_loss(
        x[:, -1], F.pad(b["classes"][:, None], (0, VOCAB - 1), value=-1), reduction=r
    ),
    "classes": lambda x, b, r: F.cross_entropy(
        x[:, -1],
        b["classes"],
        weights(x),
        ignore_index=7,
        label_smoothing=0.1,
        reduction=r,
    ),
    "weighed tokens": lambda x, b, r: F.nll_loss(
        x.log_softmax(-1).mT, b["input_ids"], weights(x), reduction=r
    ),
    "probabilities": lambda x, b, r: F.cross_entropy(
        x.mT, b["real"].softmax(-1).mT, weights(x), label_smoothing=0.1, reduction=r
    ),
}
# Written out by hand: means along some dims, samples among them.
MEANS: dict[str, Callable[[Tensor, Mapping[str, Tensor]], Tensor]] = {
    "of samples first": lambda x, b: (x - b["real"]).square().mean(0).mean(),
    "of samples last": lambda x, b: (x - b["real"]).square().mean((1, 2)).mean(0),
    "of some dims": lambda x, b: (x - b["real"]).square().mean((0, 1), True).sum(),
    "of all dims": lambda x, b: (x - b["real"]).square().mean((0, 1, 2)),
    "of one token of each sample": lambda x, b: (
        (x[torch.arange(BATCH), b["classes"] % SEQ] - x[torch.arange(BATCH), -1])
        .square()
        .mean()
    ),
    "of some tokens of each sample": lambda x, b: (
        x[torch.arange(BATCH)[:, None], -1 - b["input_ids"][:, :3] % SEQ]
        .square()
        .mean()
    ),
    "of a target of each row": lambda x, b: (
        -x.flatten(0, 1)
        .log_softmax(-1)[range(BATCH * SEQ), b["input_ids"].flatten()]
        .mean()
    ),
    "of a target of each place": lambda x, b: (
        -x.log_softmax(-1)[
            torch.arange(BATCH)[:, None].expand(BATCH, SEQ),
            torch.arange(SEQ).expand_as(b["input_ids"]),
            b["input_ids"],
        ].mean()
    ),
    "kl by samples": lambda x, b: F.kl_div(
        x.log_softmax(-1), b["real"].softmax(-1), reduction="batchmean"
    ),
}


def scalar(loss: Loss, reduction: str, x: Tensor, b: Mapping[str, Tensor]) -> Tensor:
    found = loss(x, b, reduction)
    return found if reduction != "none" else found.square().sum()


def losses_of(reduction: str) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """The losses in one reduction; of "mean" those written out by hand too."""
    yield from MEANS.items() if reduction == "mean" else ()
    for name, loss in LOSSES.items():
        yield f"{name}, {reduction}", partial(scalar, loss, reduction)


class Weighed(nn.Module):
    """Logits [b, s, v], and two weights of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weights = Stack(Layer, 2), nn.Parameter(torch.ones(2))

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(input_ids), self.weights


# Of a loss, two losses and two weights: what has no samples, with sums over samples.
MIXED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "less a penalty": lambda one, two, w: one - 0.1 * w.sum(),
    "a bound less": lambda one, two, w: w.sum() - (3 - one),
    "less, so often": lambda one, two, w: torch.sub(one, w.sum(), alpha=0.1),
    "by uncertainty": lambda one, two, w: ((-w).exp() * two + w).sum(),
    "less each penalty": lambda one, two, w: (two - w.square()).sum(),
    "beside a penalty": lambda one, two, w: torch.stack([one, w.prod()]).mean(),
    "behind penalties": lambda one, two, w: (
        torch.cat([two, w]) @ torch.ones_like(torch.cat([w, w]))
    ),
    "by weights": lambda one, two, w: torch.dot(two, w),
}


def mixed(mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def loss(out: tuple[Tensor, Tensor], b: Mapping[str, Tensor]) -> Tensor:
        errors = (out[0] - b["real"]).square()
        return mix(errors.mean(), errors[..., :2].mean((0, 1)), out[1])

    return loss


def test_what_has_no_samples_meets_sums_over_them() -> None:
    def total(*given: Tensor) -> Any:
        return sum(mix(*given) for mix in MIXED.values())

    case(mixed(total))._replace(model=randomize(Weighed()).double()).verify("dp=2", 2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_loss(name: str) -> None:
    one = case(mixed(MIXED[name]))._replace(model=randomize(Weighed()).double())
    for mesh in MESHES:
        one.verify(mesh, 2)


REDUCTIONS = ("mean", "sum", "none")


@pytest.mark.slow
@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_losses_at_once(reduction: str) -> None:
    """Each over its value, so that all count alike."""
    losses = [loss for _, loss in losses_of(reduction)]

    def loss(x: Tensor, b: Mapping[str, Tensor]) -> Any:
        return sum(one(x, b) / size for one, size in zip(losses, sizes, strict=True))

    one = case(loss)
    x = one.model(one.batch["input_ids"]).detach()
    sizes = [float(f(x, one.batch).abs()) for f in losses]
    one.verify("dp=2,tp=2", 2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, id=name) for r in REDUCTIONS for name, loss in losses_of(r)],
)
def test_a_loss(loss: Callable[..., Tensor]) -> None:
    one = case(loss)
    for mesh in MESHES:
        one.verify(mesh, 2)


def test_each_operator_that_reduces_is_known() -> None:
    """But those of backwards, and one whose mean is not that of its elements."""
    found = {
        schema.name.replace("::", ".")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
        and any(a.name == "reduction" for a in schema.arguments)
        and not any(a.is_out for a in schema.arguments)
    }
    inner = {name for name in found if name.endswith(("_backward", "_forward"))}
    assert found - inner - LOSS_RULES.keys() == {"aten.ctc_loss", "aten.nll_loss2d"}


class Distilled(nn.Module):
    """A student that learns from a frozen teacher, which is a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.teacher = GPT(Config(2, WIDTH, 4, SEQ, VOCAB)).requires_grad_(False).eval()
        self.student = GPT(Config(2, WIDTH, 4, SEQ, VOCAB))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(input_ids)[0].softmax(-1)
        logits, loss = self.student(input_ids, labels)
        assert loss is not None
        apart = F.kl_div(logits.log_softmax(-1), wanted, reduction="none")
        return loss + 2.0 * apart.sum(-1).mean()


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp=2,tp=2", {"zero": 3}), ("pp=2,tp=2", {}), ("dp=2", {"recompute": "full"})],
)
def test_a_teacher_within_a_model_stays_frozen(mesh: str, options: dict) -> None:
    case = Case(Distilled(), token_batch(BATCH, SEQ))
    case.verify(mesh, 2, **options)
    program = case.compile(mesh, 2, **options)
    trained = {name for name, spec in program.parameters.items() if spec.trainable}
    assert {name.partition(".")[0] for name in trained} == {"student"}
