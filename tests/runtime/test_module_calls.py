"""A step is called as the module is that it was compiled from."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from losses_of_rows import of_all
from models import Case
from models_of_rows import case as experts
from models_of_rows import in_place
from torch import Tensor, nn
from torch.optim import SGD

import autopar
from autopar.passes.errors import AutoparError


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(8, 16), nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor | None = None, *, power: int = 2) -> Tensor:
        error = self.drop(self.up(x)).sum(-1) - (0 if y is None else y)
        return (error.abs() ** power).mean()


def case() -> Case:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4)}
    return Case(Dropped().double(), {k: v.double() for k, v in batch.items()})


def test_fields_are_given_by_their_places() -> None:
    of = case()
    x, y = of.batch.values()
    of.model.eval()
    step = autopar.compile(of.model, "", example_inputs=(x, y))
    assert step(x, y).item() == pytest.approx(of.model(x, y).item())
    assert step(x, y=-y).item() == pytest.approx(of.model(x, -y).item())
    assert step.evaluate(x, y).item() == pytest.approx(of.model(x, y).item())
    step = autopar.compile(of.model, "", example_inputs={"x": x, "power": 3})
    assert step(x, power=3).item() == pytest.approx(of.model(x, power=3).item())


def test_a_loop_that_validates_stays_as_it_is() -> None:
    """With its modes, and under `no_grad`; and begins with it."""
    one, other = case(), case()
    x, y = one.batch.values()
    step = autopar.compile(one.model, "")
    got: list[Any] = []
    want: list[Any] = []
    for m, losses in ((step, got), (other.model, want)):
        optimizer = SGD(one.model.parameters() if m is step else m.parameters(), lr=0.1)
        if m is step:
            step.prepare(optimizer)
        for _ in range(2):
            m.eval()
            with torch.no_grad():
                losses.append(m(x, y).item())
            with torch.inference_mode():
                losses.append(m(x, -y).item())
            m.train()
            assert m.training
            state = {k: v.clone() for k, v in one.model.state_dict().items()}
            m.load_state_dict(state)  # dropout is drawn otherwise
            with getattr(m, "no_sync", nullcontext)():
                m(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            m.load_state_dict(state)
    assert got == pytest.approx(want)


def test_parameters_come_in_the_order_of_the_model() -> None:
    """Also those of experts, which ranks hold stacked: a loop may pair them."""
    model = experts(of_all, in_place).model.double()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = p.detach().clone()
    step = autopar.compile(
        model, "", example_inputs=experts(of_all, in_place).batch, prove=False
    )
    assert step.program.joined
    pairs = zip(model.named_parameters(), step.named_parameters(), strict=True)
    assert all(a == b and p.equal(q) for (a, p), (b, q) in pairs)
    other = SGD(step.parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    assert all(p.equal(own["momentum_buffer"]) for p, own in other.state.items())


def test_a_step_in_another_mode_is_refused() -> None:
    of = case()
    step = autopar.compile(of.model, "", example_inputs=of.batch)
    with torch.no_grad(), pytest.raises(AutoparError, match=r"no_grad[\s\S]*eval\(\)"):
        step(**of.batch)
    step.eval()
    with pytest.raises(AutoparError, match=r"after step.eval\(\)"):
        step(**of.batch)
    step.train()(**of.batch)
    of = case()
    of.model.eval()
    step = autopar.compile(of.model, "", example_inputs=of.batch)
    step(**of.batch)
    assert not step.training
    step.train()
    with pytest.raises(AutoparError, match=r"model.train\(\) before autopar.compile"):
        step(**of.batch)
