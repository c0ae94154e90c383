"""What loops do with a module beside calling it works with a step, or says why not."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any, cast

import pytest
import torch
from models import Case, plain_gpt
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler, swa_utils

import autopar
from autopar.passes.errors import AutoparError
from autopar.step import Step
from autopar.unlike_module import LACKS

Scheduler = Callable[[Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5),
    "warmup": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.7)],
        [2],
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1.0),
    "swa": lambda o: swa_utils.SWALR(o, 0.05, anneal_epochs=2),
}


def case() -> Case:
    return plain_gpt(layers=1, batch=4).double()


@pytest.fixture(scope="module")
def step() -> Step:
    return case().step()


def train(parameters: Any, loss_of: Callable[[], Any], make: Scheduler) -> list[float]:
    optimizer = SGD(parameters, lr=0.1, momentum=0.9)
    scheduler, losses = make(optimizer), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of()
        optimizer.step()
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([loss.detach()] if plateau else []))
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_do_as_with_the_model(name: str) -> None:
    one, other = case(), case()
    step = one.step()

    def plainly() -> torch.Tensor:
        _, loss = other.model(**other.batch)
        loss.backward()
        return loss

    got = train(step.parameters(), lambda: step(**one.batch), SCHEDULERS[name])
    want = train(other.model.parameters(), plainly, SCHEDULERS[name])
    assert got == pytest.approx(want, rel=1e-9) and got[0] != got[1]


def test_gradients_are_forgotten_as_of_a_module(step: Step) -> None:
    batch = case().batch
    step.zero_grad()
    step(**batch)
    once = [p.grad.clone() for p in step.parameters() if p.grad is not None]
    step.zero_grad(set_to_none=False)
    assert not any(bool(p.grad.any()) for p in step.parameters() if p.grad is not None)
    step.zero_grad()
    assert all(p.grad is None for p in step.parameters())
    step(**batch)
    again = [p.grad for p in step.parameters() if p.grad is not None]
    assert once and all(map(torch.equal, once, again))


@pytest.mark.parametrize("name", LACKS)
def test_what_a_step_lacks_is_told(name: str, step: Step) -> None:
    assert not hasattr(step, name)
    with pytest.raises(AttributeError, match=f"'{name}': [\\s\\S]*fix  ") as told:
        getattr(step, name)
    assert isinstance(told.value, AutoparError)


def test_a_name_that_nobody_has_is_torchs_error(step: Step) -> None:
    with pytest.raises(
        AttributeError, match=r"^'Step' object has no attribute 'losss'"
    ):
        getattr(step, "losss")  # noqa: B009


def test_averages_of_torch_say_what_there_is(step: Step) -> None:
    with pytest.raises(AutoparError, match=r"start_ema\(0.999\)"):
        swa_utils.AveragedModel(step)
    with pytest.raises(AttributeError, match="batch norm's statistics are frozen"):
        swa_utils.update_bn([torch.zeros(1)], step)


@pytest.mark.slow
def test_autocast_is_that_of_the_plan(step: Step) -> None:
    batch = case().batch
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(AutoparError, match='compile with precision="bf16"'),
    ):
        step(**batch)
    one = plain_gpt(layers=1, batch=4)
    halved = autopar.compile(
        one.model, "tp=1", precision="bf16", example_inputs=one.batch
    )
    want = halved(**one.batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert halved(**one.batch) == want
        assert halved.evaluate(**one.batch) == want
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(AutoparError, match=r"computes in torch\.bfloat16"),
    ):
        halved.evaluate(**one.batch)


# --- habits of loops that would do something else ------------------------------------


def test_a_scaler_that_looks_at_a_ranks_own_gradients_is_an_error() -> None:
    of = case()
    step, scaler = of.step(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(step.parameters(), lr=0.1)
    for unscale, backward in product((False, True), repeat=2):
        scaled = scaler.scale(step(**of.batch))
        if backward:
            scaled.backward()
        if unscale:
            scaler.unscale_(optimizer)
        with pytest.raises(AutoparError, match=r"divides gradients by 65536[\s\S]*fix"):
            scaler.step(optimizer)
        step.zero_grad()
        scaler = torch.amp.GradScaler("cpu")
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    theirs = case().model  # another model, which the scaler is for
    other = SGD(theirs.parameters(), lr=0.1)
    scaler.scale(theirs(**of.batch)[1]).backward()
    scaler.step(other)


def test_gradients_that_were_used_and_not_zeroed_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    of = case()
    step = of.step()
    optimizer = SGD(step.parameters(), lr=0.1, momentum=0.9)
    zeroing: list[Callable[[], Any]] = [
        optimizer.zero_grad,
        step.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
    ]
    for zero in zeroing:
        for _ in range(2):  # of two batches
            step(**of.batch)
        optimizer.step()
        zero()
    step(**of.batch)
    assert "zero_grad" not in caplog.text
    optimizer.step()
    of.model.zero_grad()
    step(**of.batch)
    assert "call optimizer.zero_grad() or step.zero_grad()" in caplog.text


def test_a_loss_is_kept_as_any_number(step: Step) -> None:
    loss = step(**case().batch)
    assert type(loss.exp()) is torch.Tensor and repr(loss).startswith("tensor(")
    assert f"{loss:.4f} {loss / 2:8.3f}" == f"{loss.item():.4f} {loss.item() / 2:8.3f}"
    assert float(loss) == loss.item() and not math.isnan(loss)
    # What others keep of it needs no class of ours.
    copies = [copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))]
    assert {type(x) for x in copies} == {torch.Tensor} and copies[0] == copies[
        1
    ] == loss


def test_a_term_with_a_gradient_of_its_own_is_added_to_a_loss(step: Step) -> None:
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    (step(**case().batch) + w.square().sum()).backward()
    assert w.grad is not None and torch.equal(w.grad, 2 * w)


def test_a_loss_is_not_taken_for_an_output(step: Step) -> None:
    loss: Any = step(**case().batch)
    takes: list[Callable[[], Any]] = [
        lambda: loss.loss,
        lambda: loss.logits,
        lambda: [*loss],
    ]
    for take in takes:
        with pytest.raises(AutoparError, match=r"the loss alone\n  fix  loss = step\("):
            take()
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'los'"):
        getattr(loss, "los")  # noqa: B009


def test_clipping_the_model_in_place_of_the_step_is_an_error() -> None:
    of = case()
    step = of.step()
    step(**of.batch)
    with pytest.raises(AutoparError, match=r"fix  step\.clip_grad_norm_\(max_norm\)"):
        nn.utils.clip_grad_norm_(of.model.parameters(), 1.0)
    with pytest.raises(AutoparError, match="the model's"):
        nn.utils.clip_grad_norm_(next(of.model.parameters()), 1.0)
    with pytest.raises(AutoparError, match=r"fix  clip_grad_value_\(step.parameters"):
        nn.utils.clip_grad_value_(of.model.parameters(), 1.0)
    want = step.clip_grad_norm_(float("inf"))
    assert nn.utils.clip_grad_norm_(step.parameters(), 1.0) == pytest.approx(want)
    of.model(**of.batch)[1].backward()  # it may be trained beside
    assert nn.utils.clip_grad_norm_(of.model.parameters(), 1.0) == pytest.approx(want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
def test_a_step_runs_within_what_dynamo_compiles(step: Step) -> None:
    batch = case().batch
    step.zero_grad()
    loss = step(**batch)
    want = [p.grad.clone() for p in step.parameters() if p.grad is not None]
    step.zero_grad()
    assert torch.compile(lambda: step(**batch) * 2, backend="eager")() == loss * 2
    assert want and all(map(torch.equal, want, [p.grad for p in step.parameters()]))
    assert torch.compile(step.evaluate, backend="eager")(**batch) == loss


def test_what_a_step_cannot_do_is_said(step: Step) -> None:
    of = case()
    with pytest.raises(AutoparError, match=r"cannot be pickled[\s\S]*step.state_dict"):
        pickle.dumps(step)
    with pytest.raises(AutoparError, match=r"a Step[\s\S]*torch.nn.Module"):
        autopar.compile(cast(Any, step), "tp=1")
    wrapped: dict[str, Any] = {
        'backend="inductor"': torch.compile(of.model, backend="eager"),
        "compile model.module": nn.DataParallel(of.model),
    }
    for fix, model in wrapped.items():
        with pytest.raises(AutoparError, match=fix):
            autopar.compile(model, "tp=1")
    hook = next(step.parameters()).register_hook(torch.neg)
    with pytest.raises(AutoparError, match=r"has a hook[\s\S]*p.grad is complete"):
        step(**of.batch)
    hook.remove()
    step(**of.batch)
