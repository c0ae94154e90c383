"""Losses that are a Function of their own, as those of a split vocabulary: with ignored
labels, and written over their logits."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from torch import nn

from autopar.passes.capture.forward.custom_functions import Functions


class LossOfKnown(torch.autograd.Function):
    """A cross entropy whose highest logit is no part of the derivative, though it does
    not cancel where a label is of no class."""

    @staticmethod
    def forward(ctx, logits, labels):
        shifted = logits - logits.amax(-1, keepdim=True)
        ignored = (labels < 0) | (labels >= logits.shape[-1])
        labels = labels.masked_fill(ignored, 0)
        own = shifted.gather(-1, labels[..., None])[..., 0].masked_fill(ignored, 0.0)
        exp = shifted.exp()
        total = exp.sum(-1)
        ctx.save_for_backward(exp.div_(total[..., None]), ignored, labels)
        return total.log() - own

    @staticmethod
    def backward(ctx, dy):
        dx, ignored, labels = ctx.saved_tensors
        rows = dx.view(-1, dx.shape[-1])
        rows[torch.arange(len(rows)), labels.view(-1)] -= 1.0 - ignored.view(-1).float()
        return dx.mul_(dy[..., None]), None


class LossInPlace(torch.autograd.Function):
    """The same, and leaves probabilities where there were logits."""

    @staticmethod
    def forward(ctx, logits, labels):
        logits.sub_(logits.amax(-1, keepdim=True))
        ignored = labels < 0
        labels = labels.masked_fill(ignored, 0)
        own = logits.gather(-1, labels[..., None])[..., 0].masked_fill(ignored, 0.0)
        torch.exp(logits, out=logits)
        total = logits.sum(-1)
        logits.div_(total[..., None])
        ctx.save_for_backward(logits, ignored, labels)
        return total.log() - own

    backward = LossOfKnown.backward


class Picked(torch.autograd.Function):
    """Takes no labels of no class: they are places."""

    @staticmethod
    def forward(ctx, logits, labels):
        ctx.save_for_backward(logits, labels)
        return logits.gather(-1, labels[..., None])[..., 0]

    @staticmethod
    def backward(ctx, dy):
        logits, labels = ctx.saved_tensors
        dx = torch.zeros_like(logits)
        return dx.scatter_(-1, labels[..., None], dy[..., None]), None


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.name = function, function.__name__
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids, labels):
        logits = self.head(self.embed(ids))
        loss = self.function.apply(logits, labels).mean()
        return loss + logits.square().mean()  # of probabilities, where they are left


def case(function) -> Case:
    torch.manual_seed(0)
    model = Model(function)
    ids, labels = torch.randint(0, 32, (2, 4, 8))
    if function is not Picked:
        labels[:, ::3] = -100
    return Case(model, {"ids": ids, "labels": labels})


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
@pytest.mark.parametrize("function", [LossOfKnown, LossInPlace, Picked])
def test_gradients_are_the_functions_own(mesh, function):
    case(function).verify(mesh)
    case(function).verify(mesh, drawn=True)


def own_backwards(function) -> int:
    """How many calls of a model keep their own backward."""
    model, batch, _ = case(function)
    functions = Functions()
    with functions.reading():
        model(**batch)
    functions.are_known()
    return len(functions.own)


def test_one_that_differs_for_ignored_labels_is_kept():
    assert own_backwards(LossOfKnown) == own_backwards(LossInPlace) == 1
    assert own_backwards(Picked) == 0
