"""Other names of ops, and what torch writes by ops, are split as these are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, randomize, token_batch
from torch import Tensor, nn

# Of x and y, both [b, s, 32] -> the same.
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "concatenate": lambda x, y: torch.concatenate([x[..., :8], y[..., 8:]], -1),
    "multiply": lambda x, y: torch.multiply(x, y),
    "divide": lambda x, y: torch.divide(x, y.absolute().add(1.0)).negative(),
    "subtract": lambda x, y: torch.subtract(x, y, alpha=2),
    "clip": lambda x, y: torch.clip(x, -0.5, 0.5) + torch.arctan2(x, y),
    "in place": lambda x, y: y.clone().multiply_(x).subtract_(1.0),
    "selu": lambda x, y: F.relu6(x) + F.selu(y) + torch.special.expit(y),
    "outer": lambda x, y: torch.outer(x[0, 0], y[0, 0])[:1] + y,
    "kron": lambda x, y: torch.kron(torch.ones(1, 4, dtype=x.dtype), y[..., :8]) + x,
    "a grid": lambda x, y: torch.meshgrid(x[0, 0], y[0, 0], indexing="ij")[0][0] * x,
    "without gradient": lambda x, y: without_gradient(y) * x,
}


@torch.no_grad()
def without_gradient(y: Tensor) -> Tensor:
    return torch.concatenate([y[..., 8:], y[..., :8]], -1)


class Between(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.embed, self.mid = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = CALLS[self.name](x, self.mid(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.matrix(quick=4)
@pytest.mark.parametrize("name", CALLS)
def test_no_rule_is_missing(name: str) -> None:
    torch.manual_seed(0)
    batch = token_batch(seq=4, ignored="none")
    case = Case(randomize(Between(name)), batch).double()
    case.verify("dp=2,tp=2")
    assert not [r for r in case.compile("dp=2,tp=2").remarks if "no rule" in r]
