"""`if mask.any(): loss = loss + mse(x[mask], y[mask])`: a mean of rows that the data
choose, if there are any. Programs have no `if`: of no rows it is 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn

from autopar.passes.errors import CaptureError

VOCAB, WIDTH = 16, 12

Mean = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, labels, of all; mask

MEANS: dict[str, Mean] = {
    "mean": lambda x, y, m: x[m].square().mean(),
    "of sums": lambda x, y, m: x[m].square().sum(-1).mean(),
    "of norms": lambda x, y, m: x[m].norm(dim=-1).mean(),
    "half": lambda x, y, m: 0.5 * F.mse_loss(x[m][:, 0], y[m].float()) / 3,
    "summed": lambda x, y, m: F.l1_loss(x[m][:, 0], y[m].float(), reduction="sum") / 9,
    "binary": lambda x, y, m: F.binary_cross_entropy_with_logits(
        x[m][:, 0], (y[m] > 7).float()
    ),
    "two": lambda x, y, m: x[m].mean() * F.mse_loss(x[m][:, 0], y[m].float()),
    "labels": lambda x, y, m: F.cross_entropy(x[m], y[m]),
    "smooth": lambda x, y, m: F.cross_entropy(x[m], y[m], label_smoothing=0.1),
    "nll": lambda x, y, m: F.nll_loss(x[m].log_softmax(-1), y[m]),
}
OTHERS: dict[str, Mean] = {  # what is another number of no rows
    "more": lambda x, y, m: F.cross_entropy(x[m], y[m]) + 1,
    "exp": lambda x, y, m: F.mse_loss(x[m][:, 0], y[m].float()).exp(),
    "minus": lambda x, y, m: 2 - x[m].mean(),
    "root": lambda x, y, m: x[m].square().mean().rsqrt(),
    "largest of all": lambda x, y, m: x[m].max(),
    "of each": lambda x, y, m: F.cross_entropy(x[m], y[m], reduction="none").mean(),
}
REFUSED: dict[str, Mean] = {
    "largest": lambda x, y, m: x[m].amax(0).mean(),
    "product": lambda x, y, m: x[m].square().sum(-1).prod(),
    "a pool": lambda x, y, m: x[m].amax(0, keepdim=True).softmax(-1).mean(),
    "spread": lambda x, y, m: x[m].std(),
    "turned": lambda x, y, m: (x[m] @ x[m].mT).mean(),
    "weighed": lambda x, y, m: F.cross_entropy(x[m], y[m], torch.arange(1.0, 17)),
    "joined": lambda x, y, m: torch.cat([x[m], x[0]]).mean(),
}


def added(base: Tensor, mean: Mean, *given: Tensor) -> Tensor:
    if given[-1].any():
        base = base + mean(*given)
    return base


def else_zero(base: Tensor, mean: Mean, *given: Tensor) -> Tensor:
    more = torch.tensor(0.0)
    if given[-1].sum() > 0:
        more = mean(*given)
    return base + more


def else_number(base: Tensor, mean: Mean, *given: Tensor) -> Tensor:
    more = mean(*given) if given[-1].any() else 0.0
    return base + more


def returned(base: Tensor, mean: Mean, *given: Tensor) -> Tensor:
    if not given[-1].any():
        return base * 0.0
    return mean(*given)


GUARDS = {f.__name__: f for f in (added, else_zero, else_number, returned)}


class Guarded(nn.Module):
    def __init__(self, guard: str, mean: Mean) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.guard, self.mean = GUARDS[guard], mean

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(ids).tanh())
        base = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return self.guard(base, self.mean, logits, labels, labels != -100)


def case(guard: str, mean: Mean, many: int) -> Case:
    torch.manual_seed(0)
    ids, labels = torch.randint(VOCAB, (2, 4, 6))
    labels.view(-1)[many:] = -100
    return Case(Guarded(guard, mean), {"ids": ids, "labels": labels})


@pytest.mark.matrix(quick=10, daily=24)
@pytest.mark.parametrize("many", [0, 3, 20])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("guard", GUARDS)
def test_a_mean_of_rows_if_there_are_any(guard: str, mean: str, many: int) -> None:
    of = case(guard, MEANS[mean], many)
    of.verify("dp=2", 1 if mean == "two" else 2)  # a product is no sum over samples
    of.verify("tp=2")


@pytest.mark.matrix(quick=4, daily=24)
@pytest.mark.parametrize("many", [0, 20])
@pytest.mark.parametrize("mean", OTHERS)
@pytest.mark.parametrize("guard", GUARDS)
def test_what_is_not_0_of_no_rows_is_not_taken_then(
    guard: str, mean: str, many: int
) -> None:
    of = case(guard, OTHERS[mean], many)
    of.verify("dp=2")
    of.verify("tp=2")


@pytest.mark.parametrize("mean", REFUSED)
def test_what_may_do_harm_where_there_are_no_rows_is_refused(mean: str) -> None:
    with pytest.raises(CaptureError):
        case("added", REFUSED[mean], 3).compile("dp=2")


@pytest.mark.matrix(quick=4)
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("many", [3, 20])
def test_a_mean_that_is_taken_in_any_case_is_none_of_them(mean: str, many: int) -> None:
    class Both(Guarded):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(ids)
            taken = x[labels != -100].mean() + x[ids > 3].mean()
            return super().forward(ids, labels) + taken

    Case(Both("added", MEANS[mean]), case("added", MEANS[mean], many).batch).verify(
        "dp=2", 1 if mean == "two" else 2
    )
