"""Tensors that a loss function reads though neither the model nor the batch has them:
as they are, or refused; never other values than those that training would see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import Stack, randomize, token_batch
from torch import Tensor, nn

import autopar
from autopar.passes.errors import AutoparError, CaptureError

Loss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


class Student(Stack):
    """Its labels are for the loss function."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(input_ids)


def student(loss_fn: Loss) -> Case:
    torch.manual_seed(0)
    model = randomize(Student(layers=2)).double()
    batch = {k: v for k, v in token_batch().items() if k in ("input_ids", "labels")}
    return Case(model, batch, loss_fn)


class Teacher:
    """A frozen model beside, which a student is to follow."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = randomize(Stack(layers=1)).double().requires_grad_(False)
        self.weight = torch.ones((), dtype=torch.float64)
        self.table = torch.zeros(4)

    def loss(self, out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        wanted = self.model(batch["input_ids"])
        if self.table[0] != 0 or not bool(self.weight > 0):
            wanted = wanted + self.table.sum()
        return self.weight * F.mse_loss(out, wanted)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(
    ("mesh", "microbatches", "options"),
    [
        ("tp=2", 1, {}),
        ("dp=2,tp=2", 1, {"zero": 3}),
        ("pp=2", 2, {}),
        ("cp=2", 1, {}),
    ],
)
def test_a_teacher_that_the_loss_asks_is_part_of_the_program(
    mesh, microbatches, options
):
    """Its attention is of the batch alone: it is computed ahead of the microbatches."""
    student(Teacher().loss).verify(mesh, microbatches, **options)


CHANGES: dict[str, tuple[Callable[[Teacher], Any], str]] = {
    "in place": (lambda teacher: teacher.weight.mul_(2), "test_outside.py:"),
    "what was asked": (lambda teacher: teacher.table.add_(1), "test_outside.py:"),
    "by .data": (lambda teacher: teacher.weight.data.mul_(2), "test_outside.py:"),
    "weights": (
        lambda teacher: next(teacher.model.parameters()).data.mul_(0.5),
        "models.py:",
    ),
}


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("how", CHANGES)
def test_what_changes_after_it_was_compiled_is_refused(how):
    teacher = Teacher()
    model, batch, loss_fn = student(teacher.loss)
    step = autopar.compile(model, "", loss_fn=loss_fn, example_inputs=batch)
    for _ in range(3):
        step(**batch)
    change, file = CHANGES[how]
    change(teacher)
    with pytest.raises(AutoparError, match=r"has changed since the step") as told:
        for _ in range(2):
            step(**batch)
    assert str(told.value.source).startswith(file)


def test_a_loss_that_chooses_rows_twice_is_no_loop_over_experts():
    def loss(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        chosen = batch["labels"] != -100
        return (out[chosen] * batch["input_ids"][~chosen].sum()).square().mean()

    assert student(loss).trace().remarks == ()


def test_what_is_drawn_is_no_known_value():
    table = torch.zeros(4)

    def loss(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return out.mean() * torch.rand_like(table).sum().item() ** 0.5

    assert "by .item() or .tolist()" in refused(loss).message


def reads_detached(out: Tensor, scale: nn.Parameter) -> Tensor:
    return (out * scale.detach()).square().mean()


def reads_without_gradient(out: Tensor, scale: nn.Parameter) -> Tensor:
    with torch.no_grad():
        wanted = out * scale
    return (out - wanted).square().mean()


@pytest.mark.parametrize("reads", [reads_detached, reads_without_gradient])
def test_what_is_read_without_its_gradient_is_a_constant(reads):
    scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    student(lambda out, batch: reads(out, scale)).verify("tp=2")


def refused(loss_fn: Loss) -> CaptureError:
    with pytest.raises(CaptureError) as told:
        student(loss_fn).trace()
    assert str(told.value.source).startswith("test_outside.py:")
    return told.value


def test_a_parameter_that_the_model_does_not_have_is_refused():
    head = nn.Linear(3, 3).double()
    error = refused(lambda out, batch: head(out[..., :3]).square().mean())
    assert "(3, 3) wants a gradient, but is no parameter of the model" in error.message


def test_a_parameter_of_the_model_is_read_by_its_name():
    case = student(lambda out, batch: out.mean() + case.model.head.bias.square().sum())
    case.verify("tp=2")
    own = case.model.head.bias
    by_reference = Case(
        case.model, case.batch, lambda out, batch: out.mean() + own.square().sum()
    )
    with pytest.raises(CaptureError, match=r"'head.bias' is read by a reference of"):
        by_reference.trace()


def test_what_a_vmap_reads_is_a_tensor_outside_or_none():
    """Torch wraps all that a vmap reads, for as long as it is at work."""
    table = torch.ones(3, dtype=torch.float64)

    def loss(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        scale = torch.vmap(lambda one, place: one + place)(table, torch.arange(3))
        return torch.vmap(lambda x: (x * scale.sum()).square().mean())(out).mean()

    model, batch, loss_fn = student(loss)
    step = autopar.compile(model, "", loss_fn=loss_fn, example_inputs=batch)
    wanted = loss(model(**batch), batch)
    for _ in range(2):
        torch.testing.assert_close(step(**batch), wanted)
    table += 1
    with pytest.raises(AutoparError, match=r"\(3,\) has changed since the step"):
        step(**batch)
