"""What is compiled, and proved, does not depend on the modes that the caller is in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from plans import CONFIG
from processes import run_ranks

import autopar
from examples.gpt import build

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "device": partial(torch.device, "meta"),
}


def modules_compiled_within(mode: str) -> dict[str, str]:
    """In a process that has compiled nothing before: some of it is kept."""
    model, batch = build(CONFIG, 4)
    plan = autopar.Plan(autopar.Mesh.parse("tp=2"))
    with MODES[mode]():
        program = autopar.compile_offline(model, batch, plan, prove=True)
    return dict(program.modules)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
def test_a_program_is_the_same_in_each_mode(mode: str) -> None:
    [within] = run_ranks(modules_compiled_within, 1, mode)
    [without] = run_ranks(modules_compiled_within, 1, "none")
    assert within == without


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_batches_of_a_shape_that_was_evaluated_first_are_trained(mode: str) -> None:
    model, batch = build(CONFIG, 4)
    step = autopar.compile(model, "", example_inputs=batch)
    short = {name: x[:3, :8] for name, x in batch.items()}
    with MODES[mode]():
        evaluated = step.evaluate(**short)
    loss = step(**short)
    model(**short)[1].backward()
    assert torch.equal(evaluated, loss)
    for name, p in step.named_parameters():
        expected = model.get_parameter(name).grad
        torch.testing.assert_close(p.grad, expected, rtol=1e-3, atol=1e-6)
    torch.optim.SGD(step.parameters()).step()


def test_a_step_that_is_compiled_without_gradients_around_it_has_them() -> None:
    model, batch = build(CONFIG, 4)
    step = autopar.compile(model, "", prove=False)
    with torch.inference_mode():
        step.build(**batch)
    step(**batch)
    torch.optim.SGD(step.parameters()).step()
    assert all(p.grad is not None and p.grad.any() for p in step.parameters())
