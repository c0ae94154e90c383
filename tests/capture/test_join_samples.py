"""Samples that are joined to others, as the two answers of a preference: microbatches
have those of both that belong together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, Block, Stack, randomize
from torch import Tensor, nn

from autopar.passes.errors import LossNotSeparable

JOINS = {
    "cat": lambda a, b: torch.cat([a, b]),
    "by a dim from the end": lambda a, b: torch.cat([a, b], -2),
    "three": lambda a, b: torch.cat([a, b, a]),
    "stack": lambda a, b: torch.stack([a, b]).flatten(0, 1),
    "repeat": lambda a, b: a.repeat(2, 1),
    "expand": lambda a, b: a.expand(2, *a.shape).reshape(-1, a.shape[1]),
}
CUTS = {
    "chunk": lambda x, n: x.chunk(len(x) // n)[:2],
    "split": lambda x, n: x.split(n)[:2],
    "slices": lambda x, n: (x[:n], x[n : 2 * n]),
    "from the end": lambda x, n: (x[:n], x[-n:]),
    "view": lambda x, n: x.view(-1, n, *x.shape[1:])[:2],
}


class Pairs(nn.Module):
    def __init__(self, join: str, cut: str) -> None:
        super().__init__()
        self.model = randomize(Stack(Block, 2))
        self.join, self.cut = JOINS[join], CUTS[cut]

    def scores(self, ids: Tensor) -> Tensor:
        rows = self.model(ids).log_softmax(-1)
        return rows.gather(-1, ids[..., None])[..., 0].sum(-1)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        ids = self.join(chosen, rejected)
        better, worse = self.cut(self.scores(ids), len(chosen))
        margin = better - worse
        return -F.logsigmoid(margin).mean() - 1e-2 * better.mean()


def case(join: str, cut: str) -> Case:
    torch.manual_seed(0)
    chosen, rejected = torch.randint(VOCAB, (2, 4, 6))
    return Case(Pairs(join, cut), {"chosen": chosen, "rejected": rejected})


@pytest.mark.matrix(quick=8, daily=24)
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("join", JOINS)
def test_joined_samples_are_shared_out_together(join: str, cut: str, mesh: str) -> None:
    cuts = ("model.blocks.1",) if mesh == "pp=2" else ()
    case(join, cut).verify(mesh, 2, cuts=cuts)


class Halves(nn.Module):
    """The batch itself is the two halves, which are no microbatch's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = randomize(Stack(Block, 2))

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.model(ids).mean((1, 2))
        return F.softplus(rows[:2] - rows[2:]).mean()


def test_halves_of_the_batch_are_not() -> None:
    of = Case(Halves(), {"ids": torch.randint(VOCAB, (4, 6))})
    of.verify("dp=2")
    with pytest.raises(LossNotSeparable):
        of.compile("dp=2", 2)
