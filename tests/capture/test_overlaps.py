"""Writes into a tensor of what another part of it holds."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from cases import Case
from torch import Tensor, nn

from autopar.passes.capture.exported.overlaps import overlap_in_part
from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError
from autopar.passes.graph import Node, Value

Views = list[tuple[str, tuple[object, ...]]]


def drawn_views(draw: random.Random, x: Tensor) -> Views:
    """Some views one after the other: an op and what follows its tensor."""
    views: Views = []
    for _ in range(draw.randint(0, 3)):
        dim = draw.randrange(x.ndim)
        match draw.choice(["slice", "slice", "transpose", "select"]):
            case "slice":
                start = draw.randint(0, x.shape[dim] - 1)
                end, step = draw.randint(start + 1, x.shape[dim]), draw.randint(1, 3)
                views.append(("aten.slice.Tensor", (dim, start, end, step)))
            case "transpose":
                views.append(("aten.transpose.int", (dim, draw.randrange(x.ndim))))
            case "select" if x.ndim > 1:
                number = draw.randrange(x.shape[dim])
                views.append(("aten.select.int", (dim, number)))
            case _:
                continue
        x = elements(x, views[-1:])
    return views


def elements(x: Tensor, views: Views) -> Tensor:
    for op, rest in views:
        x = getattr(torch.ops.aten, op.split(".")[1])(x, *rest)
    return x


def nodes(root: Value, views: Views) -> list[Node]:
    return [Node(op, (root, *rest), {}, (root,)) for op, rest in views]


@pytest.mark.parametrize("seed", range(12))
def test_overlaps_are_those_of_the_elements(seed: int) -> None:
    draw = random.Random(seed)
    known = 0
    for _ in range(200):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 4)))
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        root = Value("x", shape, torch.float32)
        one, other = drawn_views(draw, whole), drawn_views(draw, whole)
        told = overlap_in_part(root, nodes(root, one), nodes(root, other))
        x, y = elements(whole, one), elements(whole, other)
        shared = bool({*x.flatten().tolist()} & {*y.flatten().tolist()})
        if told is not None:
            known += 1
            assert told == (shared and not torch.equal(x, y)), (shape, one, other)
    assert known > 100


class Written(nn.Module):
    """body: what it does to its hidden state [batch, seq, width]."""

    def __init__(self, body: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.body, self.linear = body, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.body(x)
        return x.sin().mean()


def shift(x: Tensor) -> None:
    x[:, 1:] = x[:, :-1]


def shift_channels(x: Tensor) -> None:
    heads = x.unflatten(-1, (2, 4))
    heads[:, 1:, :, 2:] = heads[:, :-1, :, 2:]


def running(x: Tensor) -> None:
    x[:, 1:] += x[:, :-1]


def shift_copies(x: Tensor) -> None:
    x[:, 1:] = x[:, :-1].clone()


def halves(x: Tensor) -> None:
    x[..., :4] = x[..., 4:]


def even_from_odd(x: Tensor) -> None:
    x[..., ::2] += x[..., 1::2]


def own(x: Tensor) -> None:
    x[:, 1:] += x[:, 1:]


def model_of(body: Callable[[Tensor], None]) -> Case:
    return Case(Written(body), {"x": torch.randn(4, 6, 8)})


@pytest.mark.parametrize("body", [shift, shift_channels, running])
def test_a_write_that_reads_what_it_has_just_written_is_refused(body) -> None:
    case = model_of(body)
    with pytest.raises(CaptureError, match=r"clone\(\)") as error:
        trace(case.model, case.batch)
    assert "test_overlaps.py" in error.value.source


@pytest.mark.parametrize("body", [shift_copies, halves, even_from_odd, own])
def test_one_that_reads_other_elements_is_computed(body) -> None:
    model_of(body).verify("dp=2", 2)
