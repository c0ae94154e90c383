"""Loops that keep `loss.backward()` around a step do what they do with the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from models import plain_gpt
from plans import batch_of, small_model
from processes import run_ranks
from torch import Tensor
from torch.optim import SGD, Optimizer

import autopar
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program
from autopar.step import Step

Losses = Sequence[Callable[[], Tensor]]  # of some batches
Loop = Callable[[Any, Optimizer, Losses], object]
BATCHES, STEPS = 3, 3


def zeroed_between(m: Any, o: Optimizer, losses: Losses) -> None:
    """As torch's tutorials have it."""
    loss = losses[0]()
    o.zero_grad()
    loss.backward()
    o.step()


def of_a_mean(m: Any, o: Optimizer, losses: Losses) -> None:
    for loss in losses:
        (loss() / len(losses)).backward()
    o.step()
    o.zero_grad()


def of_a_mean_of_other_weights(m: Any, o: Optimizer, losses: Losses) -> None:
    o.zero_grad(set_to_none=False)
    for i, of in enumerate(losses):
        loss = of()
        loss *= torch.tensor(0.3 + i)
        torch.stack([loss, 0.5 * loss]).sum().backward()
    o.step()


def anew(m: Any, o: Optimizer, losses: Losses) -> None:
    """What was added up is dropped, between forward and backward."""
    (losses[0]() * 0.5).backward()
    (losses[1]() * 0.7).backward()
    loss = losses[2]()
    o.zero_grad()
    (0.3 * loss).backward()
    o.step()


def clipped_in_two_parts(m: Any, o: Optimizer, losses: Losses) -> None:
    """By a norm that the loop keeps."""
    losses[0]().backward()
    grads = (p.grad for p in m.parameters() if p.grad is not None)
    norm = torch.nn.utils.get_total_norm(grads, error_if_nonfinite=True)
    torch.nn.utils.clip_grads_with_norm_(m.parameters(), 0.1, norm)
    torch.nn.utils.clip_grad_norm_(m.parameters(), 0.07, error_if_nonfinite=True)
    for group in o.param_groups:
        group["lr"] = 0.1 * float(norm)
    o.step()
    o.zero_grad()


def zeroed_in_part(m: Any, o: Optimizer, losses: Losses) -> None:
    """An optimizer of some parameters zeroes theirs, between forward and backward."""
    _, *others = m.parameters()
    some = SGD(others, lr=0.1)
    losses[0]().backward()
    loss = losses[1]()
    some.zero_grad()
    (loss / 2).backward()
    loss = losses[2]()
    some.zero_grad()
    loss.backward()
    some.step()
    o.step()
    o.zero_grad()


def one_only_looked_at(m: Any, o: Optimizer, losses: Losses) -> None:
    o.zero_grad()
    losses[0]()
    o.zero_grad()
    losses[1]().backward()
    o.step()


def of_a_sum(m: Any, o: Optimizer, losses: Losses) -> None:
    sum((loss() for loss in losses), torch.zeros(())).backward()
    o.step()
    o.zero_grad()


def with_a_term(m: Any, o: Optimizer, losses: Losses) -> None:
    o.zero_grad()
    penalty = 0.01 * sum(p.square().sum() for p in m.parameters())
    (losses[0]() / 2).backward()
    penalty.backward()
    o.step()


def by_a_disabled_scaler(m: Any, o: Optimizer, losses: Losses) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    o.zero_grad()
    for loss in losses:
        scaler.scale(loss() / len(losses)).backward()
    scaler.unscale_(o)
    scaler.step(o)
    scaler.update()


def clipped(m: Any, o: Optimizer, losses: Losses) -> None:
    for loss in losses:
        loss().backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    torch.nn.utils.clip_grad_norm_([p for p in m.parameters()], max_norm=0.05)
    o.step()
    o.zero_grad()


LOOPS: Mapping[str, Loop] = {
    loop.__name__: loop
    for loop in (
        *(zeroed_between, of_a_mean, of_a_mean_of_other_weights, anew, of_a_sum),
        *(with_a_term, by_a_disabled_scaler, clipped, zeroed_in_part),
        *(one_only_looked_at, clipped_in_two_parts),
    )
}


def train(loop: Loop, m: Any, loss_of: Callable[[int], Tensor]) -> list[float]:
    optimizer = SGD(m.parameters(), lr=0.1, momentum=0.9)
    seen: list[float] = []

    def of(i: int) -> Tensor:
        loss = loss_of(i)
        seen.append(loss.item())
        return loss

    for i in range(STEPS):
        batches = range(BATCHES * i, BATCHES * (i + 1))
        loop(m, optimizer, [lambda i=i: of(i) for i in batches])  # type: ignore[misc]
    return seen


@cache
def on_one_device() -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    results = {}
    for name, loop in LOOPS.items():
        model = small_model().double()
        seen = train(loop, model, lambda i, m=model: m(**batch_of(i))[1])
        results[name] = seen, model.state_dict()
    return results


def on_ranks(program: Program) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    results = {}
    for name, loop in LOOPS.items():
        step = autopar.compile(
            small_model().double(),
            program.mesh,
            program=program,
            example_inputs=batch_of(0),
        )
        seen = train(loop, step, lambda i, step=step: step(**batch_of(i)))
        results[name] = seen, step.state_dict()
    return results


@pytest.mark.matrix(quick=0, daily=3)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("tp=2", {}),
        ("dp=2", {"zero": 3}),
        ("pp=2", {}),
        ("dp=2", {"zero": 1, "offload": True}),
        ("dp=2", {}),
    ],
)
def test_a_loop_keeps_its_backward(mesh: str, options: Mapping[str, Any]) -> None:
    plan = Plan(Mesh.parse(mesh), 2, **options)
    batch = batch_of(0)
    program = autopar.compile_offline(
        small_model().double(), batch, plan, cluster=PLAIN, prove=True
    )
    for results in run_ranks(on_ranks, 2, program):
        for name, (seen, state) in on_one_device().items():
            got, weights = results[name]
            assert got == pytest.approx(seen, rel=1e-9), name
            for key, value in state.items():
                torch.testing.assert_close(weights[key], value, rtol=1e-7, atol=1e-9)


@pytest.fixture
def step() -> Step:
    return plain_gpt(layers=1, batch=4).double().step()


def gradients(step: Step) -> list[Tensor]:
    return [p.grad.clone() for p in step.parameters() if p.grad is not None]


def test_gradients_are_there_without_backward_and_a_multiple_after_it(
    step: Step,
) -> None:
    batch = plain_gpt(layers=1, batch=4).double().batch
    loss = step(**batch)
    plain = gradients(step)
    loss.backward()
    assert plain and all(map(torch.equal, plain, gradients(step)))
    step.zero_grad()
    loss = step(**batch)
    loss.backward(torch.tensor(4.0))
    fours = gradients(step)
    assert len(fours) == len(plain)
    assert all(torch.equal(4 * p, q) for p, q in zip(plain, fours, strict=True))


def test_a_backward_that_cannot_be_what_it_is_of_is_refused(step: Step) -> None:
    batch = plain_gpt(layers=1, batch=4).double().batch
    optimizer = SGD(step.parameters(), lr=0.1)

    def twice() -> None:
        loss = step(**batch)
        loss.backward()
        loss.backward()

    def after_another_step() -> None:
        loss = step(**batch) / 2 + step(**batch)
        loss.backward()

    def after_an_update() -> None:
        loss = step(**batch)
        optimizer.step()
        loss.backward()

    def after_zeros() -> None:
        loss = step(**batch)
        optimizer.zero_grad(set_to_none=False)
        (loss / 2).backward()

    def of_what_is_zeroed() -> None:
        loss = step(**batch)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()

    def with_a_term_that_came_first() -> None:
        loss = step(**batch)
        optimizer.zero_grad()
        (loss + sum(p.square().sum() for p in step.parameters())).backward()

    def beside_one_without_backward() -> None:
        step(**batch)
        step(**batch).backward()
        optimizer.step()

    def after_a_change() -> None:
        loss = step(**batch)
        for p in step.parameters():
            p.grad = None if p.grad is None else 2 * p.grad
        (loss / 2).backward()

    for loop, why in (
        (twice, "called before"),
        (after_another_step, "another step came"),
        (after_an_update, "an optimizer has used"),
        (after_zeros, "written to since"),
        (after_a_change, "written to since"),
        (of_what_is_zeroed, "zeroed in place since"),
        (with_a_term_that_came_first, "replaced since"),
        (beside_one_without_backward, "had no backward"),
    ):
        step.zero_grad()
        with pytest.raises(AutoparError, match=why):
            loop()


def test_gradients_that_a_loop_keeps_stay_as_they_are(step: Step) -> None:
    batch = plain_gpt(layers=1, batch=4).double().batch
    optimizer = SGD(step.parameters(), lr=0.1, momentum=0.9)
    [bucket] = step.executor.gradients.buckets

    def place_after_a_step() -> int:
        step(**batch).backward()
        torch.nn.utils.clip_grad_norm_(step.parameters(), 1.0)
        optimizer.step()
        grad = next(step.parameters()).grad
        optimizer.zero_grad()
        step(**batch)
        assert grad is not None  # one that is left over needs no other memory
        optimizer.zero_grad()
        return bucket.flat.data_ptr()

    place = place_after_a_step()
    assert place == place_after_a_step()
    step(**batch)
    kept = [p.grad.detach() for p in step.parameters() if p.grad is not None]
    values = gradients(step)
    optimizer.step()
    optimizer.zero_grad()
    step(**batch)
    assert all(map(torch.equal, kept, values))
    assert not any(map(torch.equal, kept, gradients(step)))
    optimizer.zero_grad()
    place = place_after_a_step()
    assert place == place_after_a_step()


def test_an_update_without_gradients_is_told(
    step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    batch = plain_gpt(layers=1, batch=4).double().batch
    optimizer = SGD(step.parameters(), lr=0.1)
    for _ in range(2):
        step(**batch)
        optimizer.step()
        optimizer.zero_grad()
    loss = step(**batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step(**batch)
    assert "found no gradients" not in caplog.text
    optimizer.zero_grad()
    optimizer.step()
    step(**batch)
    assert "found no gradients" in caplog.text
