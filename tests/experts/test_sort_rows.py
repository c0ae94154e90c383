"""Rows are brought into the order of their experts once, for all that is done there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import WIDTH, Stack, randomize, token_batch
from torch import Tensor, nn

from autopar.options import make_plan
from autopar.passes.ops.experts import GROUP, GROUPED, PERMUTE, PRODUCT, UNPERMUTE
from autopar.passes.pipeline import lower

EXPERTS, CHOSEN, HIDDEN, SEQ = 4, 2, 24, 8


class Mixture(nn.Module):
    """add: what experts make of rows [n, 32] for those chosen [n], given itself."""

    def __init__(self, add: Callable[[Mixture, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weight, chosen = self.router(rows).softmax(-1).topk(CHOSEN)
        each = rows.repeat_interleave(CHOSEN, 0)
        y = self.add(self, each, chosen.flatten()) * weight.view(-1, 1)
        return x + y.unflatten(0, (-1, CHOSEN)).sum(1).view_as(x)


def times(w: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
    return torch.bmm(w[chosen], x[..., None])[..., 0]


def plain(m: Mixture, x: Tensor, chosen: Tensor) -> Tensor:
    return times(m.down, F.silu(times(m.up, x, chosen)), chosen)


def biased(m: Mixture, x: Tensor, chosen: Tensor) -> Tensor:
    h = times(m.up, x, chosen) + m.up_bias[chosen]
    return times(m.down, F.gelu(h), chosen)


def gated(m: Mixture, x: Tensor, chosen: Tensor) -> Tensor:
    a, b = times(m.up, x, chosen).split(HIDDEN // 2, -1)
    return times(m.down, torch.cat([a * b.sigmoid(), b], -1), chosen)


def mixed(m: Mixture, x: Tensor, chosen: Tensor) -> Tensor:
    """Rows meet others of their sample between the products."""
    h = times(m.up, x, chosen).unflatten(0, (-1, CHOSEN * SEQ))
    return times(m.down, h.cumsum(1).flatten(0, 1), chosen)


def with_others(m: Mixture, x: Tensor, chosen: Tensor) -> Tensor:
    """Rows in two orders are added up."""
    other = (chosen + 1) % EXPERTS
    h = times(m.up, x, chosen) + times(m.up, x, other)
    return times(m.down, h, chosen)


def turned(m: Mixture, x: Tensor, chosen: Tensor) -> Tensor:
    """Rows that are a column of what is done meanwhile."""
    h = times(m.up, x, chosen).t().contiguous().t()
    return times(m.down, h, chosen)


# How often rows are grouped, and values permuted and put back.
ONCE = (1, 1, 1)
TIMES = {
    plain: ONCE,
    biased: (1, 2, 1),  # of which one is a column of ones
    gated: (1, 2, 2),
    mixed: (1, 2, 2),
    with_others: (1, 2, 2),
    turned: (1, 2, 2),
}


def loss(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())


def build(add: Callable[[Mixture, Tensor, Tensor], Tensor]) -> Case:
    torch.manual_seed(0)
    model = randomize(Stack(lambda: Mixture(add), layers=1))
    batch = token_batch(8, SEQ, ignored="none")
    return Case(model, batch, loss).double()


@pytest.mark.parametrize("add", TIMES)
def test_rows_are_permuted_once(add) -> None:
    lowered, _ = lower(build(add).trace(), make_plan("tp=1"), lambda name, made: None)
    counts = Counter(node.op for node in lowered.graph.nodes)
    assert tuple(counts[op] for op in (GROUP, PERMUTE, UNPERMUTE)) == TIMES[add]
    assert counts[GROUPED] == 2
    assert counts[PRODUCT] == (add in (biased, with_others))


@pytest.mark.parametrize("add", TIMES)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [("tp=1", {}), ("ep=2", {}), ("tp=2", {}), ("dp=2,ep=2", {"zero": 3})],
)
def test_loss_and_gradients_are_the_model_s(add, mesh, options) -> None:
    build(add).verify(mesh, 2, **options)
