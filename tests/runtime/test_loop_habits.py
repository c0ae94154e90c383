"""What people write in their loops around a step gives what it gives with the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from zlib import crc32

import pytest
import torch
from losses_of_rows import of_all
from models import VOCAB
from models_of_rows import case, in_place
from plans import batch_of as batch_of_gpt
from plans import small_model
from processes import run_ranks
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import autopar
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program

Compute = Callable[[int], Tensor]  # a batch's loss; its gradients are there after it
Habit = Callable[[Any, Compute], list[Tensor]]
STEPS = 5


def loop(
    optimizer: Optimizer,
    compute: Compute,
    after_backward: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> list[Tensor]:
    losses = []
    for i in range(STEPS):
        optimizer.zero_grad()
        losses.append(compute(i))
        after_backward()
        optimizer.step()
        after()
    return losses


def by_name(m: Any, compute: Compute) -> list[Tensor]:
    named = dict(m.named_parameters())
    decays = [n for n in named if n.endswith("weight") and "norm" not in n]
    groups = [
        {"params": [named[n] for n in decays], "weight_decay": 0.3},
        {"params": [p for n, p in named.items() if n not in decays], "lr": 1e-3},
    ]
    return loop(AdamW(groups, lr=1e-2), compute)


def a_group_added(m: Any, compute: Compute) -> list[Tensor]:
    first, *rest = m.parameters()
    optimizer = AdamW([first], lr=1e-2)
    optimizer.add_param_group({"params": rest, "lr": 1e-3})
    return loop(optimizer, compute)


def accumulated(m: Any, compute: Compute) -> list[Tensor]:
    optimizer, losses = AdamW(m.parameters(), lr=1e-2), []
    for i in range(2 * STEPS):
        losses.append(compute(i))
        if i % 2:
            torch._foreach_div_([p.grad for p in m.parameters()], 2)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def averaged_by_hand(m: Any, compute: Compute) -> list[Tensor]:
    average = {name: x.clone() for name, x in m.state_dict().items()}

    def update() -> None:
        for name, x in m.state_dict().items():
            average[name].lerp_(x, 0.1)

    losses = loop(AdamW(m.parameters(), lr=1e-2), compute, after=update)
    m.load_state_dict(average)
    return [*losses, compute(STEPS)]


def decayed_by_hand(m: Any, compute: Compute) -> list[Tensor]:
    def decay() -> None:
        for p in m.parameters():
            p.data -= 0.01 * p.data

    return loop(SGD(m.parameters(), lr=0.1), compute, after=decay)


def resumed(m: Any, compute: Compute) -> list[Tensor]:
    optimizer = AdamW(m.parameters(), lr=1e-2, amsgrad=True)
    losses = loop(optimizer, compute)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer = AdamW(m.parameters(), lr=1.0)
    optimizer.load_state_dict(state)
    return losses + loop(optimizer, compute)


def slow_weights(m: Any, compute: Compute) -> list[Tensor]:
    slow = [p.detach().clone() for p in m.parameters()]

    @torch.no_grad()
    def pull() -> None:
        for p, q in zip(m.parameters(), slow, strict=True):
            p.copy_(q.lerp_(p, 0.5))

    return loop(SGD(m.parameters(), lr=0.1), compute, after=pull)


def perturbed(m: Any, compute: Compute) -> list[Tensor]:
    """Gradients of weights beside, as minimisers of sharpness take them."""
    optimizer, losses = SGD(m.parameters(), lr=0.1), []
    for i in range(STEPS):
        optimizer.zero_grad()
        losses.append(compute(i))
        moves = [0.01 * p.grad.tanh() for p in m.parameters()]
        with torch.no_grad():
            torch._foreach_add_([*m.parameters()], moves)
            optimizer.zero_grad()
            with torch.enable_grad():
                compute(i)
            torch._foreach_sub_([*m.parameters()], moves)
        optimizer.step()
    return losses


def gradients_in_other_memory(m: Any, compute: Compute) -> list[Tensor]:
    """As older loops write into them and zero them."""
    optimizer, losses = SGD(m.parameters(), lr=0.1, momentum=0.9), []
    for i in range(STEPS):
        losses.append(compute(i))
        for p in m.parameters():
            p.grad.data = p.grad.data * 0.5
        optimizer.step()
        for p in m.parameters():
            p.grad.detach_()
            p.grad.data.zero_()
    return losses


def without_an_optimizer(m: Any, compute: Compute) -> list[Tensor]:
    losses = []
    for i in range(STEPS):
        for p in m.parameters():
            p.grad = None
        losses.append(compute(i))
        with torch.no_grad():
            for p in m.parameters():
                p -= 0.1 * p.grad
    return losses


def averaged_gradients(m: Any, compute: Compute) -> list[Tensor]:
    """Slow ones are amplified (Lee 2024); the first are kept as they are."""
    slow: dict[str, Tensor] = {}

    def amplify() -> None:
        for name, p in m.named_parameters():
            new = p.grad.data.detach()
            slow[name] = slow[name] * 0.8 + new * 0.2 if name in slow else new
            p.grad.data = p.grad.data + slow[name] * 2

    optimizer = SGD(m.parameters(), lr=0.1)
    return loop(optimizer, compute, after_backward=amplify)


def gradients_of_two_batches(m: Any, compute: Compute) -> list[Tensor]:
    optimizer, losses = SGD(m.parameters(), lr=0.1), []
    for i in range(STEPS):
        optimizer.zero_grad()
        losses.append(compute(2 * i))
        first = [p.grad for p in m.parameters()]
        optimizer.zero_grad()
        losses.append(compute(2 * i + 1))
        for p, grad in zip(m.parameters(), first, strict=True):
            p.grad.add_(grad, alpha=-0.5)
        optimizer.step()
    return losses


def averages_in_their_place(m: Any, compute: Compute) -> list[Tensor]:
    """Their tensors for one batch, and then those that were put aside."""
    named = dict(m.named_parameters())
    averages = {name: p.detach().clone() for name, p in named.items()}
    optimizer, losses = SGD(named.values(), lr=0.1), []
    for i in range(STEPS):
        aside = {name: p.data for name, p in named.items()}
        for name, p in named.items():
            p.data = averages[name]
        losses.append(compute(i))
        for name, p in named.items():
            p.data = aside[name]
        optimizer.zero_grad()
        losses.append(compute(i))
        optimizer.step()
        for name, p in named.items():
            averages[name] = averages[name].lerp(p.data, 0.3)
    return losses


def rates_by_name(m: Any, compute: Compute) -> list[Tensor]:
    """Each parameter in a group of its own; of a rank, it has other experts in them."""
    groups = [
        {"params": [p], "lr": 1e-3 * (1 + crc32(name.partition("[")[0].encode()) % 7)}
        for name, p in m.named_parameters()
    ]
    return loop(AdamW(groups), compute)


def one_part(m: Any, compute: Compute) -> list[Tensor]:
    """Which ranks may have nothing of."""
    named = m.named_parameters()
    own = [p for n, p in named if n.startswith(("h.0.", "layers.0.experts.1."))]
    optimizer, losses = SGD([{"params": own}], lr=0.1), []
    for i in range(STEPS):
        m.zero_grad()
        losses.append(compute(i))
        optimizer.step()
    return losses


def frozen_for_a_while(m: Any, compute: Compute) -> list[Tensor]:
    """A layer, or an expert, whose gradients stay as they are meanwhile."""
    optimizer = AdamW(m.parameters(), lr=1e-2, weight_decay=0.1)
    parts = "h.0.", "layers.0.experts.1."
    own = [p for n, p in m.named_parameters() if n.startswith(parts)]
    losses = []
    for i in range(STEPS):
        for p in own:
            p.requires_grad_(i % 2 == 0)
        losses.append(compute(i))
        optimizer.step()
        for p in m.parameters():
            p.grad = p.grad if p.grad is None or not p.requires_grad else None
    return losses


def one_without_gradients(m: Any, compute: Compute) -> list[Tensor]:
    """And one with others than it was given."""

    def change() -> None:
        for name, p in m.named_parameters():
            if name.startswith(("h.0.", "layers.0.experts.1.")):
                p.grad = None
            elif name.startswith(("h.1.", "layers.0.experts.2.")):
                p.grad = p.grad.sin() + 0.1 * p.detach()

    optimizer = SGD(m.parameters(), lr=0.1, momentum=0.9)
    return loop(optimizer, compute, after_backward=change)


def seeded(m: Any, compute: Compute) -> list[Tensor]:
    """Each rank otherwise, as for its data: what the step computes is not drawn so."""
    torch.manual_seed(1000 + getattr(m, "data_rank", 0))
    return loop(SGD(m.parameters(), lr=0.1), compute, after=lambda: torch.rand(3))


def under_anomaly_detection(m: Any, compute: Compute) -> list[Tensor]:
    with torch.autograd.set_detect_anomaly(True):
        return loop(SGD(m.parameters(), lr=0.1), compute)


HABITS: Mapping[str, Habit] = {
    "fused": lambda m, c: loop(AdamW(m.parameters(), lr=1e-2, fused=True), c),
    "foreach": lambda m, c: loop(AdamW(m.parameters(), lr=1e-2, foreach=True), c),
    "names": lambda m, c: loop(AdamW(m.named_parameters(), lr=1e-2), c),
    "nesterov": lambda m, c: loop(
        SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), c
    ),
    "centered": lambda m, c: loop(RMSprop(m.parameters(), 1e-3, centered=True), c),
    "values clipped": lambda m, c: loop(
        SGD(m.parameters(), lr=1.0),
        c,
        lambda: nn.utils.clip_grad_value_(m.parameters(), 1e-3),
    ),
    **{
        habit.__name__: habit
        for habit in (
            *(by_name, a_group_added, accumulated, averaged_by_hand, decayed_by_hand),
            *(resumed, slow_weights, perturbed, without_an_optimizer, seeded),
            *(rates_by_name, one_part, gradients_in_other_memory),
            *(averages_in_their_place, frozen_for_a_while, one_without_gradients),
            *(under_anomaly_detection, averaged_gradients, gradients_of_two_batches),
        )
    },
}


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return (experts() if kind == "experts" else small_model()).double()


def experts() -> nn.Module:
    return case(of_all, in_place).model


def batch_of(kind: str, i: int) -> dict[str, Tensor]:
    ids, labels = batch_of_gpt(i).values()
    if kind == "gpt":
        return {"ids": ids, "labels": labels}
    return {"input_ids": ids % VOCAB, "labels": labels % VOCAB}


@cache
def on_one_device(kind: str) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    results = {}
    for name, habit in HABITS.items():
        m = model(kind)

        def compute(i: int, m: nn.Module = m) -> Tensor:
            returned = m(**batch_of(kind, i))
            loss: Tensor = returned if isinstance(returned, Tensor) else returned[1]
            loss.backward()
            return loss

        losses = [loss.item() for loss in habit(m, compute)]
        results[name] = losses, m.state_dict()
    return results


def on_ranks(
    kind: str, program: Program
) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    results = {}
    for name, habit in HABITS.items():
        step = autopar.compile(
            model(kind), program.mesh, program=program, example_inputs=batch_of(kind, 0)
        )
        losses = [
            loss.item()
            for loss in habit(step, lambda i, step=step: step(**batch_of(kind, i)))
        ]
        results[name] = losses, step.state_dict()
    return results


@pytest.mark.matrix(quick=0, daily=2)
@pytest.mark.parametrize(
    ("kind", "mesh", "zero"),
    [
        ("gpt", "tp=2", 0),
        ("experts", "ep=2", 0),
        ("gpt", "dp=2", 0),
        ("gpt", "dp=2", 3),
        ("gpt", "pp=2", 0),
        ("experts", "dp=2", 3),
    ],
)
def test_a_loop_does_with_a_step_what_it_does_with_the_model(kind, mesh, zero) -> None:
    plan = Plan(Mesh.parse(mesh), 2, zero=zero)
    batch = batch_of(kind, 0)
    program = autopar.compile_offline(  # proved here, and not for each habit
        model(kind), batch, plan, cluster=PLAIN, prove=True
    )
    assert bool(program.joined) is (kind == "experts")
    for results in run_ranks(on_ranks, 2, kind, program):
        for name, (losses, state) in on_one_device(kind).items():
            got, weights = results[name]
            assert got == pytest.approx(losses, rel=1e-9), name
            for key, value in state.items():
                torch.testing.assert_close(weights[key], value, rtol=1e-7, atol=1e-9)
