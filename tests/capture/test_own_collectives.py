"""Collectives that forward calls itself: nothing in a group of one rank, refused in a
larger one."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as dist_nn
from cases import Case
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")


@pytest.fixture(params=[1])
def ranks(request):
    """How many ranks the group has that is all."""
    if request.param == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield request.param
    dist.destroy_process_group()


of_two = pytest.mark.parametrize("ranks", [2], indirect=True)


class Through(torch.autograd.Function):
    """What a collective gives, with the gradient of what it is given."""

    @staticmethod
    def forward(ctx, x, collective):
        return collective(x)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def through(collective, x: Tensor) -> Tensor:
    return Through.apply(x, collective)


class Copy(torch.autograd.Function):
    """Sums gradients, as before a product whose columns are split."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        dist.all_reduce(dy)
        return dy


class SplitLoss(torch.autograd.Function):
    """The cross entropy of logits whose vocabulary is split."""

    @staticmethod
    def forward(ctx, logits, labels):
        highest = logits.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        shifted = logits - highest[..., None]
        exp = shifted.exp()
        total = exp.sum(-1)
        dist.all_reduce(total)
        own = shifted.gather(-1, labels[..., None])[..., 0]
        dist.all_reduce(own)
        ctx.save_for_backward(exp / total[..., None], labels)
        return total.log() - own

    @staticmethod
    def backward(ctx, dy):
        probabilities, labels = ctx.saved_tensors
        dx = probabilities - F.one_hot(labels, probabilities.shape[-1])
        return dx * dy[..., None], None


def reduced(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def reduced_later(x: Tensor) -> Tensor:
    y = x.clone()
    dist.all_reduce(y, async_op=True).wait()
    return y


def broadcast(x: Tensor) -> Tensor:
    y = x.clone()
    dist.broadcast(y, 0)
    return y


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts, -1)


def exchanged(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x)
    return y


def scattered(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    dist.reduce_scatter_tensor(y, x)
    return y


def summed(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


def waited(x: Tensor) -> Tensor:
    dist.barrier()
    return x


# Torch 2.11 asks nobody of the others: who calls them learns what a capture cannot run.
ASKED = "handle_torch_function" in inspect.getsource(dist.broadcast)
WRITE = (reduced, reduced_later, gathered, exchanged, scattered)
WRITE += (broadcast,) if ASKED else ()
COLLECTIVES = {f.__name__: partial(through, f) for f in WRITE}
COLLECTIVES |= {"in the backward": Copy.apply, "summed": summed}
OTHERS = {"barrier": waited, "none": nn.Identity()}


class Model(nn.Module):
    """Calls a collective in each layer, and others in its loss where that is split."""

    def __init__(self, name, split_loss=False):
        super().__init__()
        self.name, self.split_loss = name, split_loss
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, ids, labels):
        collective = {**COLLECTIVES, **OTHERS}[self.name]
        x = self.embed(ids)
        for layer in self.layers:
            x = x + F.gelu(collective(layer(x)))
        logits = self.head(x)
        if self.split_loss:
            return SplitLoss.apply(logits, labels).mean()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def case(name, split_loss=False) -> Case:
    torch.manual_seed(0)
    model = Model(name, split_loss)
    ids, labels = torch.randint(0, 32, (2, 4, 8))
    return Case(model, {"ids": ids, "labels": labels})


@pytest.mark.parametrize("name", COLLECTIVES)
def test_of_one_rank_they_change_nothing(ranks, name):
    made = case(name)
    assert "c10d" not in "".join(made.compile("dp=2,tp=2").modules.values())
    made.verify("dp=2,tp=2")


def test_a_loss_of_a_split_vocabulary(ranks):
    case("none", split_loss=True).verify("dp=2,tp=2")


@of_two
@pytest.mark.parametrize("name", COLLECTIVES)
def test_of_more_ranks_they_are_refused(ranks, name):
    with pytest.raises(CaptureError, match="group of 2") as error:
        trace(*case(name)[:2])
    assert "test_own_collectives.py" in error.value.source
    assert "groups of one rank" in error.value.fix


def test_what_torch_exports_with_its_group_is_refused(ranks):
    with pytest.raises(CaptureError, match="by itself: 'barrier'") as error:
        trace(*case("barrier")[:2])
    assert "test_own_collectives.py" in error.value.source


@pytest.mark.skipif(not ASKED, reason="torch 2.11 fails otherwise")
def test_those_that_torch_exports_nowhere_are_to_be_left_out(ranks):
    class Summing(nn.Linear):
        def forward(self, x):
            return dist_nn.all_reduce(super().forward(x)).square().mean()

    with pytest.raises(CaptureError, match="all_reduce is not supported") as error:
        trace(Summing(4, 4), {"x": torch.randn(2, 4)})
    assert "leave out what sums over processes" in error.value.fix
