"""Ops that are called by other names are split as by their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, randomize, token_batch
from torch import Tensor, nn

from autopar.passes.capture.exported.other_names import NAMES, usual_op

# Of x and y, both [b, s, 32] -> the same.
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "concatenate": lambda x, y: torch.concatenate([x[..., :8], y[..., 8:]], -1),
    "concat": lambda x, y: torch.concat([x[..., :8], y[..., 8:]], dim=-1),
    "multiply": lambda x, y: torch.multiply(x, y).multiply(2.0),
    "divide": lambda x, y: torch.divide(x, y.absolute().add(1.0)).negative(),
    "subtract": lambda x, y: torch.subtract(x, y, alpha=2),
    "clip": lambda x, y: torch.clip(x, -0.5, 0.5) + torch.arctan2(x, y),
    "in place": lambda x, y: y.clone().multiply_(x).subtract_(1.0).absolute_(),
    "special": lambda x, y: torch.special.expit(x) + torch.special.log1p(y * y),
    "swapaxes": lambda x, y: x.swapaxes(1, 2).moveaxis(1, 2) * y,
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


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_the_same(name: str) -> None:
    packet = getattr(torch.ops.aten, name)
    known = 0
    for form in packet.overloads():
        op = getattr(packet, form)
        if "out" in form or "Dimname" in str(op._schema):
            continue
        usual = usual_op(op)
        ours, torchs = (o._schema.arguments for o in (op, usual))
        assert [str(a.type) for a in ours] == [str(a.type) for a in torchs], form
        assert [a.default_value for a in ours] == [a.default_value for a in torchs]
        known += 1
    assert known
