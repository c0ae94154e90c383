"""A batch that is padded has the loss and the gradients that it has without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import Stack, gpt2, llama, plain_gpt, randomize, switch_gpt, token_batch
from processes import run_ranks
from torch import Tensor

import autopar
from autopar import other_shapes
from autopar.capture.weightless import without_weights
from autopar.options import make_plan
from autopar.passes.capture.forward.call_model import loss_of
from autopar.passes.errors import BatchError
from autopar.proof import padding
from autopar.proof.padding import Fills, find_fills, pad
from autopar.step import Step

Batch = dict[str, Tensor]


def fills_of(of: Case, dim: int) -> Fills:
    """For batches of another length in this one of their dims."""
    zeros = {name: torch.zeros_like(x) for name, x in of.batch.items()}
    dims = {(name, dim) for name in of.batch}
    program = of.compile("tp=1")
    model, loss_fn = without_weights(of.model, of.loss_fn)
    return find_fills(model, program, zeros, dims, loss_fn)


def step_of(of: Case, batch: Mapping[str, Any]) -> list[Tensor]:
    """Loss and gradients of the model itself."""
    loss = loss_of(of.model, batch, of.loss_fn)
    parameters = [p for p in of.model.parameters() if p.requires_grad]
    return [loss, *torch.autograd.grad(loss, parameters)]


def each_token(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(logits.mT, batch["labels"], reduction="none")


def masked(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """The mean over the tokens that a mask shows."""
    nll = F.cross_entropy(logits.mT, batch["target"], reduction="none")
    return (nll * batch["shown"]).sum() / batch["shown"].sum()


def of_samples(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """The mean over samples of the means over their tokens."""
    counts = (batch["labels"] != -100).sum(1).clamp(min=1)
    return (each_token(logits, batch).sum(1) / counts).mean()


def summed(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return each_token(logits, batch).sum()


def with_z(logits: Tensor, batch: Mapping[str, Any]) -> Any:
    """A scalar that counts each token, beside a loss that does not."""
    ce = each_token(logits, batch).sum() / (batch["labels"] != -100).sum()
    return {"loss": ce, "z": logits.logsumexp(-1).mean()}


def squared(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return logits.square().sum()


def stack(loss: Callable[[Any, Mapping[str, Any]], Any]) -> Case:
    torch.manual_seed(0)
    batch = token_batch()
    if loss is masked:
        shown = (batch["labels"] != -100).float()
        ids = batch["input_ids"]
        batch = {"input_ids": ids, "target": ids.roll(-1, 1), "shown": shown}
    return Case(randomize(Stack(layers=2)), batch, loss).double()


PADDED: list[Any] = [
    (lambda: plain_gpt(layers=2), 0, {"labels": -100}),
    (lambda: plain_gpt(layers=2), 1, {"labels": -100}),
    (lambda: stack(masked), 0, {"shown": 0, "target": -100}),
    (lambda: stack(summed), 1, {"labels": -100}),
    pytest.param(lambda: gpt2(layers=1), 0, {"labels": -100}, marks=pytest.mark.slow),
    pytest.param(
        lambda: llama(layers=1, padded=True),
        1,
        {"labels": -100},
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "dim", "wanted"), PADDED)
def test_padding_changes_neither_loss_nor_gradients(
    make: Callable[[], Case], dim: int, wanted: Fills
) -> None:
    of = make().double()
    found = fills_of(of, dim)
    assert found == wanted
    shapes = {n: tuple(x.shape) for n, x in of.batch.items()}
    short = {n: x.narrow(dim, 0, x.shape[dim] - 4) for n, x in of.batch.items()}
    longer = pad(short, shapes, found)
    for got, want in zip(step_of(of, longer), step_of(of, short), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


REFUSED: list[Any] = [
    (lambda: stack(with_z), 1, "z is another one"),
    (lambda: stack(squared), 0, "no labels that it ignores, and no mask"),
    (lambda: stack(with_z), 0, "z is another one"),
    (lambda: stack(of_samples), 0, "the loss is another one"),
    # Its experts are balanced over all tokens.
    pytest.param(switch_gpt, 0, "is another one", marks=pytest.mark.slow),
]


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(("make", "dim", "says"), REFUSED)
def test_a_loss_that_counts_what_is_padded_is_refused(
    make: Callable[[], Case], dim: int, says: str
) -> None:
    with pytest.raises(BatchError, match=rf"{says}[\s\S]*fix  .*drop_last=True"):
        fills_of(make().double(), dim)


@pytest.mark.slow
def test_a_large_model_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "LITTLE", 0)
    assert fills_of(plain_gpt(layers=6), 1) == {"labels": -100}


@pytest.mark.slow
def test_after_the_last_program_batches_are_padded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the smallest shape that is kept and covers them."""
    monkeypatch.setattr(other_shapes, "MOST", 2)
    of = plain_gpt(layers=1).double()
    step = of.step()
    for rows, seq, taken in ((8, 16, 128), (6, 12, 72), (5, 9, 72), (7, 3, 128)):
        batch = {name: x[:rows, :seq] for name, x in of.batch.items()}
        step.zero_grad()
        loss, want = step(**batch), step_of(of, batch)
        torch.testing.assert_close(loss, want[0], rtol=1e-9, atol=0)
        for (name, p), grad in zip(step.named_parameters(), want[1:], strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad, grad, rtol=1e-9, atol=1e-12, msg=name)
        [shape] = {shape for shape, _ in step.program.inputs.values()}
        assert shape[0] * shape[1] == taken
    with pytest.raises(BatchError, match=r"after 2 other shapes\n.*step\.build"):
        step(**{name: x.repeat(2, 1) for name, x in of.batch.items()})


@pytest.mark.slow
def test_what_evaluates_takes_no_program_from_what_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As text that is generated, one token longer each time."""
    monkeypatch.setattr(other_shapes, "MOST", 2)

    def loss(logits: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"loss": summed(logits, batch), "logits": logits}

    of = stack(loss).double()
    step = of.step()

    def logits(rows: int, seq: int) -> None:
        batch = {name: x[:rows, :seq] for name, x in of.batch.items()}
        got = step.evaluate(outputs=("logits",), **batch)["logits"]
        want = of.model(batch["input_ids"]).detach()
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)

    for size in ((8, 12), (3, 9), (2, 9)):  # the last one is padded to that before
        logits(*size)
    with pytest.raises(BatchError, match=r"\[3, 10\].*after 2 [\s\S]*fix  pad rows to"):
        logits(3, 10)
    for rows, seq, taken in ((8, 16, 16), (8, 14, 14), (8, 13, 14)):
        batch = {name: x[:rows, :seq] for name, x in of.batch.items()}
        torch.testing.assert_close(step(**batch), step_of(of, batch)[0])
        assert {shape for shape, _ in step.program.inputs.values()} == {(rows, taken)}


# --- several ranks -------------------------------------------------------------------


def last_samples(of: Case, step: Step, rows: int) -> tuple[Batch, Tensor]:
    """A batch of the last samples, and its loss, which is the model's, as the norm of
    the gradients is."""
    batch = {name: x[-rows:] for name, x in of.batch.items()}
    step.zero_grad()
    loss, want = step(**batch), step_of(of, batch)
    torch.testing.assert_close(loss, want[0], rtol=1e-9, atol=1e-12)
    norm = step.clip_grad_norm_(1e9)
    total = torch.stack([g.norm() for g in want[1:]]).norm()
    torch.testing.assert_close(norm, total, rtol=1e-9, atol=1e-12)
    return batch, loss


def contrast(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Each sample beside all others of the batch: nothing, where there is no other."""
    pooled = logits.mean(1)
    return F.cross_entropy(pooled @ pooled.T / 8, torch.arange(len(pooled)))


UNEVEN = {"mean": (of_samples, 2), "contrast": (contrast, 1)}


def uneven_batches(mesh: str, name: str) -> None:
    """Trains on batches that no rank may leave a sample out of, down to one sample."""
    own, microbatches = UNEVEN[name]

    def loss(logits: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"loss": own(logits, batch), "logits": logits}

    of = stack(loss)
    step = autopar.compile(
        of.model,
        mesh,
        microbatches=microbatches,
        loss_fn=of.loss_fn,
        example_inputs=of.batch,
    )
    for rows in (8, 5, 6, 1, 3, 8):
        batch, now = last_samples(of, step, rows)
        assert step.evaluate(**batch) == pytest.approx(now.item(), rel=1e-9, abs=1e-12)
    short = {name: x[:5] for name, x in of.batch.items()}
    found = step.evaluate(outputs=("logits",), **short)
    want = of.model(short["input_ids"]).detach()
    torch.testing.assert_close(found["logits"], want)


@pytest.mark.matrix(quick=0, daily=3)
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2"])
@pytest.mark.parametrize("name", UNEVEN)
def test_some_ranks_compute_a_sample_more(mesh: str, name: str) -> None:
    run_ranks(uneven_batches, 2, mesh, name)


def test_fewer_samples_take_no_more_memory_at_once() -> None:
    plan = make_plan("dp=2", microbatches=4)
    for samples, parts in ((16, 4), (8, 4), (12, 4), (6, 2), (7, 7), (1, 1), (32, 8)):
        assert other_shapes.for_samples(plan, samples, 16).microbatches == parts
    once = make_plan("dp=2")
    assert other_shapes.for_samples(once, 32, 16) is once


def short_batches() -> list[int]:
    """Trains on 5 samples and 3 over two ranks, and evaluates; logits of them, too."""
    of = plain_gpt(layers=1).double()
    step = autopar.compile(
        of.model, "dp=2", microbatches=2, zero=1, example_inputs=of.batch
    )
    for rows in (8, 5, 8, 3):
        batch, loss = last_samples(of, step, rows)
        assert step.evaluate(**batch) == pytest.approx(loss.item(), rel=1e-9)
    found = step.evaluate(outputs=("0",), **batch)
    torch.testing.assert_close(found["0"], of.model(**batch)[0].detach())
    return [len(step._shapes._executors), *step.program.inputs["labels"][0]]


@pytest.mark.slow
def test_batches_that_do_not_divide_over_ranks() -> None:
    """They take no program of their own, but for the logits."""
    assert run_ranks(short_batches, 2) == [[2, 8, 16]] * 2


def single_samples() -> None:
    """Trains on one sample after eight, and on eight after one, over two ranks that add
    up gradients: each computes all of a single sample."""
    of = plain_gpt(layers=1).double()
    for first, later in ((8, 1), (1, 8)):
        batch = {name: x[:first] for name, x in of.batch.items()}
        step = autopar.compile(of.model, "dp=2", example_inputs=batch)
        for rows in (first, later, first, later):
            last_samples(of, step, rows)


@pytest.mark.slow
def test_a_single_sample_is_computed_by_all_ranks() -> None:
    run_ranks(single_samples, 2)
