"""A step that fails leaves nothing: who catches the error goes on as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from plans import batch_of, made, small_model, small_program
from processes import run_ranks
from torch import Tensor

from autopar.passes.errors import IndexOutOfRange
from autopar.passes.program import Program
from autopar.runtime.agreement.agreement import FIRST, Agreement
from autopar.runtime.comm.fake_comm import FakeComm
from autopar.step import Step


def bad_batch(i: int) -> dict[str, Tensor]:
    """A label is of no class, in the last sample: microbatches before it are good."""
    batch = batch_of(i)
    labels = batch["labels"].clone()
    labels[-1, 3] = 1000
    return {**batch, "labels": labels}


def gradients_around_bad_batches(program: Program) -> tuple[float, dict[str, Tensor]]:
    """The loss and gradients after a batch, two that fail, and another batch."""
    step = made(program)
    step(**batch_of(0))
    fail(step)
    loss = step(**batch_of(1))
    whole = {n: p for n, p in step.named_parameters() if p.grad is not None}
    return loss.item(), {n: p.grad.as_subclass(Tensor) for n, p in whole.items()}


def fail(step: Step) -> None:
    with pytest.raises(IndexOutOfRange):
        step(**bad_batch(2))
    with pytest.raises(IndexOutOfRange):
        step.evaluate(**bad_batch(2))
    assert all(not stage.residuals for stage in step.executor.stages.values())


def check(loss: float, gradients: dict[str, Tensor]) -> None:
    """Whether they are those of the model, of the good batches alone."""
    torch.manual_seed(0)
    model = small_model()
    losses = [model(**batch_of(i))[1] for i in range(2)]
    torch.autograd.backward(losses)
    assert loss == pytest.approx(losses[1].item(), rel=1e-5)
    for name, p in model.named_parameters():
        if name in gradients and gradients[name].shape == p.shape:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-3, atol=1e-5)


def test_a_step_that_failed_takes_no_gradients_and_leaves_no_loss() -> None:
    check(*gradients_around_bad_batches(small_program("", 2)))


@pytest.mark.slow
def test_all_ranks_go_on_after_a_step_that_failed_on_all() -> None:
    program = small_program("tp=2", 2)
    for result in run_ranks(gradients_around_bad_batches, 2, program):
        check(*result)


class Noted(Agreement):
    """Notes for each batch whether ranks wait for each other before they begin."""

    def __init__(self, program: Program) -> None:
        super().__init__(FakeComm(program.mesh, 1, torch.device("cpu"), 0), program)
        self.waited: list[bool] = []

    def __call__(self, *_: Any) -> None:
        self.waited.append(True)

    @contextmanager
    def ahead(self, *_: Any) -> Iterator[None]:
        self.waited.append(False)
        yield


def test_after_a_failure_ranks_wait_before_they_begin_the_next_step() -> None:
    """Else messages of a rank that goes on would meet those of the step that failed,
    in which other ranks still are."""
    program = small_program("dp=2", 1)
    held = {name: torch.zeros(spec.shape) for name, spec in program.parameters.items()}
    updates = cast(Any, SimpleNamespace(facts=lambda: ({}, {}), parameters=held))
    agreement = Noted(program)
    for i in range(FIRST + 4):
        steps = {"steps": min(i, FIRST + 2)}  # that were done
        with suppress(IndexError), agreement.on_batch("step", {}, updates, (steps, {})):
            if i == FIRST + 2:
                raise IndexError
    # After 4 steps they compare weights.
    assert agreement.waited == [True] * FIRST + [True, False, False, True]
