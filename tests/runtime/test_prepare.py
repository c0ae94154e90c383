"""An optimizer of the model's parameters is given those of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from losses_of_rows import of_all
from models import VOCAB, plain_gpt
from models_of_rows import case, in_place
from plans import batch_of as batch_of_gpt
from plans import small_model
from processes import run_ranks
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import autopar
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program

STEPS = 3


def by_dims(model: nn.Module) -> Optimizer:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 1e-3}]
    return AdamW(groups, lr=1e-2, amsgrad=True)


def by_module(model: nn.Module) -> Optimizer:
    """As a method of a model makes it, which reads its modules."""
    groups: list[dict[str, Any]] = []
    seen: set[nn.Parameter] = set()  # of tied weights
    for path, module in model.named_children():
        named = [(f"{path}.{n}", p) for n, p in module.named_parameters()]
        own = [(n, p) for n, p in named if p not in seen]
        seen.update(p for _, p in own)
        if own:
            groups.append({"params": own, "lr": 1e-2 / (1 + len(groups))})
    return SGD(groups, lr=1e-2, momentum=0.9)


MAKES: Mapping[str, Callable[[nn.Module], Optimizer]] = {
    make.__name__: make for make in (by_dims, by_module)
}


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    made = case(of_all, in_place).model if kind == "experts" else small_model()
    return made.double()


def batch_of(kind: str, i: int) -> dict[str, Tensor]:
    ids, labels = batch_of_gpt(i).values()
    if kind == "gpt":
        return {"ids": ids, "labels": labels}
    return {"input_ids": ids % VOCAB, "labels": labels % VOCAB}


def loss_of(m: nn.Module, kind: str, i: int) -> Tensor:
    returned = m(**batch_of(kind, i))
    loss: Tensor = returned if isinstance(returned, Tensor) else returned[1]
    loss.backward()
    return loss


def trained(kind: str, make: str) -> tuple[nn.Module, Optimizer]:
    """A model that has been trained on one device, and goes on here."""
    m = model(kind)
    optimizer = MAKES[make](m)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss_of(m, kind, i)
        optimizer.step()
    return m, optimizer


Results = dict[str, tuple[list[float], dict[str, Tensor]]]


@cache
def on_one_device(kind: str) -> Results:
    results = {}
    for make in MAKES:
        m, optimizer = trained(kind, make)
        schedule, losses = CosineAnnealingLR(optimizer, STEPS), []
        for i in range(STEPS):
            optimizer.zero_grad()
            losses.append(loss_of(m, kind, i).item())
            optimizer.step()
            schedule.step()
        results[make] = losses, m.state_dict()
    return results


def on_ranks(kind: str, program: Program) -> Results:
    results = {}
    for make in MAKES:
        m, optimizer = trained(kind, make)
        schedule, losses = CosineAnnealingLR(optimizer, STEPS), []
        step = autopar.compile(m, program.mesh, program=program)
        if make == "by_dims":  # else the first batch compiles
            step.build(**batch_of(kind, 0))
        groups = len(optimizer.param_groups)
        assert step.prepare(optimizer) is optimizer
        assert len(optimizer.param_groups) == groups
        for i in range(STEPS):
            optimizer.zero_grad()
            losses.append(step(**batch_of(kind, i)).item())
            optimizer.step()
            schedule.step()
        held = dict(step.named_parameters())
        for group in optimizer.param_groups:
            for p, name in zip(
                group["params"], group.get("param_names", ()), strict=False
            ):
                assert held[name] is p
        results[make] = losses, step.state_dict()
    return results


@pytest.mark.matrix(quick=1, daily=3)
@pytest.mark.parametrize(
    ("kind", "mesh", "zero"),
    [
        ("gpt", "tp=2", 0),
        ("experts", "ep=2", 0),
        ("gpt", "dp=2", 3),
        ("gpt", "pp=2", 0),
    ],
)
def test_an_optimizer_goes_on_with_a_ranks_parts(
    kind: str, mesh: str, zero: int
) -> None:
    plan = Plan(Mesh.parse(mesh), 2, zero=zero)
    program = autopar.compile_offline(
        model(kind), batch_of(kind, 0), plan, cluster=PLAIN, prove=True
    )
    for results in run_ranks(on_ranks, 2, kind, program):
        for make, (losses, state) in on_one_device(kind).items():
            got, weights = results[make]
            assert got == pytest.approx(losses, rel=1e-9), make
            for key, value in state.items():
                torch.testing.assert_close(weights[key], value, rtol=1e-7, atol=1e-9)


def loaded_before_and_after(program: Program) -> str:
    m, saved = model("gpt"), trained("gpt", "by_dims")[1].state_dict()
    step = autopar.compile(m, program.mesh, program=program)
    step.build(**batch_of("gpt", 0))
    before, after = by_dims(m), AdamW(by_dims(m).param_groups)
    before.load_state_dict(saved)
    step.prepare(before)
    step.prepare(after).load_state_dict(saved)
    step(**batch_of("gpt", 0))
    before.step()
    with pytest.raises(AutoparError) as error:
        after.step()
    return str(error.value)


@pytest.mark.slow
def test_state_of_one_device_is_refused_where_ranks_have_parts() -> None:
    made = model("gpt"), batch_of("gpt", 0), Plan(Mesh.parse("tp=2"))
    program = autopar.compile_offline(*made, cluster=PLAIN, prove=True)
    for said in run_ranks(loaded_before_and_after, 2, program):
        assert "AdamW's 'exp_avg' of 'tokens.weight' is of all of it, [64, 32]" in said


def test_an_optimizer_that_keeps_its_parameters_itself_trains_the_steps() -> None:
    of, other = plain_gpt(layers=1).double(), plain_gpt(layers=1).double()
    step = autopar.compile(of.model, "", example_inputs=of.batch)
    losses: list[list[float]] = []
    for m, own in ((of.model, step), (other.model, other.model)):
        optimizer: Any = LBFGS(m.parameters(), max_iter=2)
        if m is of.model:
            step.prepare(optimizer)

        def closure(own: Any = own, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            returned = own(**of.batch)
            loss: Tensor = returned if own is step else returned[1]
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).item() for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][2] < losses[0][0]


class Mapped(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.rates = {p: 0.1 for group in self.param_groups for p in group["params"]}


def test_one_that_would_update_the_model_is_refused() -> None:
    of = plain_gpt(layers=1)
    step = of.step()
    with pytest.raises(AutoparError, match="in its 'rates' as well"):
        step.prepare(Mapped(of.model.parameters()))
    assert step.prepare(Mapped(step.parameters()))


def test_an_optimizer_of_another_model_is_refused_and_stays() -> None:
    of = plain_gpt(layers=1)
    step = of.step()
    foreign: Any = nn.Parameter(torch.ones(3))
    optimizer = AdamW([*of.model.parameters(), foreign])
    before = copy.copy(optimizer.param_groups[0]["params"])
    with pytest.raises(AutoparError, match=r"a parameter \[3\] that is not of the mod"):
        step.prepare(optimizer)
    assert all(map(lambda p, q: p is q, optimizer.param_groups[0]["params"], before))
    own = AdamW(step.parameters())
    params = own.param_groups[0]["params"]
    assert step.prepare(own).param_groups[0]["params"] == params
