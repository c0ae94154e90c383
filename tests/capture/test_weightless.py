"""A loss function reads what forward leaves at its model, for later shapes too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import Stack, randomize, token_batch
from torch import Tensor, nn

import autopar
from autopar.capture.weightless import without_weights


class Leaves(nn.Module):
    """Returns logits, and leaves its loss, as llama2.c's model does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack(layers=1)
        self.last_loss: Tensor | None = None

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.inner.head(self.inner.embed(input_ids))
        self.last_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return logits


class Trainer:
    def __init__(self, model: Leaves) -> None:
        self.model = model

    def loss(self, out: Any, batch: Any) -> Any:
        return self.model.last_loss

    __call__ = loss


of_file: Leaves


def read_of_file(out: Any, batch: Any) -> Any:
    return of_file.last_loss


def of_closure(model: Leaves) -> Callable[..., Any]:
    return lambda out, batch: model.last_loss


def of_function(model: Leaves) -> Callable[..., Any]:
    inner = of_closure(model)
    return lambda out, batch: inner(out, batch)


def of_default(model: Leaves) -> Callable[..., Any]:
    def loss(out: Any, batch: Any, *, of: Leaves = model) -> Any:
        return of.last_loss

    return loss


def of_global(model: Leaves) -> Callable[..., Any]:
    global of_file
    of_file = model
    return read_of_file


WAYS: dict[str, Callable[[Leaves], Callable[..., Any]]] = {
    "closure": of_closure,
    "function": of_function,
    "default": of_default,
    "global": of_global,
    "method": lambda model: Trainer(model).loss,
    "object": Trainer,
    "partial": lambda model: functools.partial(lambda m, out, b: m.last_loss, model),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_function_reads_the_model_that_is_captured(way: str) -> None:
    model = randomize(Leaves())
    loss_fn = WAYS[way](model)
    copied, own = without_weights(model, loss_fn)
    assert own is not None and own is not loss_fn
    model.last_loss, copied.last_loss = torch.tensor(1.0), torch.tensor(2.0)
    assert loss_fn(None, {}).item() == 1.0
    assert own(None, {}).item() == 2.0


def test_one_that_reads_no_model_stays_what_it_is() -> None:
    scale = torch.nn.Linear(1, 1)

    def loss(out: Any, batch: Any) -> Any:
        return F.mse_loss(out, scale(out))

    for own in (loss, F.mse_loss, nn.MSELoss(), functools.partial(loss, batch={})):
        kept = without_weights(Leaves(), own)[1]
        assert kept is own or isinstance(kept, functools.partial)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["closure", "method", "global"])
def test_other_shapes_and_evaluation_compute_the_loss(way: str) -> None:
    torch.manual_seed(0)
    of = Case(randomize(Leaves()), token_batch()).double()
    loss_fn = WAYS[way](of.model)
    step = autopar.compile(
        of.model, "dp=1", loss_fn=loss_fn, example_inputs=of.batch, prove=False
    )
    short = {name: x[:2] for name, x in of.batch.items()}
    for batch in (of.batch, short):
        loss = step(**batch)
        evaluated = step.evaluate(**batch)
        of.model(**batch)
        torch.testing.assert_close(loss, of.model.last_loss)
        torch.testing.assert_close(evaluated, of.model.last_loss)


@pytest.mark.slow
def test_what_cannot_be_captured_again_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    of = Case(randomize(Leaves()), token_batch()).double()
    far = [Trainer(of.model)]  # found by no look at what the function reads

    def loss_fn(out: Any, batch: Any) -> Any:
        return far[0].model.last_loss

    step = Case(of.model, of.batch, loss_fn).step()
    loss = step(**of.batch)
    torch.testing.assert_close(step.evaluate(**of.batch), loss)
    assert "the model computes in train mode is refused" in caplog.text
