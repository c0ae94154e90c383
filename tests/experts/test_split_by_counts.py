"""Rows that are split by how many each expert has: one product of all, as loops are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops_of_pieces import (
    OTHERWISE,
    PIECES,
    by_running_sums,
    in_two_steps,
    of_a_table,
    put_back,
    unless_none,
    without_empty,
)
from losses_of_rows import of_all
from models_of_rows import EXPERTS, WIDTH, case, split
from torch import Tensor

from autopar.options import make_plan
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError
from autopar.passes.pipeline import compile_program
from autopar.passes.proof.extents import Extent
from autopar.proof.small import make_small

MESHES = ("ep=2", "dp=2", "ep=2,tp=2", "cp=2,ep=2")


@pytest.mark.matrix(quick=2, daily=18)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("add", PIECES)
def test_loss_and_gradients_are_the_model_s(
    add: Callable[..., Tensor], mesh: str
) -> None:
    case(of_all, add).verify(mesh, 1)


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("add", PIECES)
def test_all_experts_are_one_parameter(add: Callable[..., Tensor]) -> None:
    """And no row is sorted."""
    traced = case(of_all, add).trace()
    shapes = {v.name: v.shape for v in traced.graph.params}
    assert shapes["layers.0.experts[0:3].1.weight"] == (EXPERTS, 48, WIDTH)
    assert not any("experts.0.1" in name for name in shapes) and not traced.remarks
    names = {node.name for node in normalize(traced).graph.nodes}
    assert not {"aten.sort", "aten.argsort", "aten.repeat_interleave"} & names


def other_counts(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """The rows are in another order than that of the numbers which are counted."""
    order = chosen.flatten().argsort(stable=True, descending=True)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    pieces = x[order // chosen.shape[1]].split(counts)
    y = torch.cat([m.experts[e](piece) for e, piece in enumerate(pieces)])
    y = y[order.argsort()].view(*chosen.shape, -1)
    return (y * weight[..., None]).sum(1)


def counted_in_order(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """As many rows of the first tokens as there are for the first expert, and so on."""
    counts = torch.bincount(chosen[:, 0], minlength=EXPERTS).tolist()
    return torch.cat([m.experts[e](piece) for e, piece in enumerate(x.split(counts))])


@pytest.mark.parametrize("add", [other_counts, counted_in_order, split])
def test_pieces_are_those_of_the_counts(add: Callable[..., Tensor]) -> None:
    one = case(of_all, add)
    for mesh in ("dp=2", "ep=2"):
        one.verify(mesh, 1)


@pytest.mark.parametrize("add", [without_empty, by_running_sums, unless_none])
def test_experts_without_rows_may_be_left_out(add: Callable[..., Tensor]) -> None:
    one = case(of_all, add)
    with torch.no_grad():  # an expert that nobody chooses
        one.model.layers[0].router.weight[1] = -100 * one.model.embed.weight.mean(0)
    one.model.embed.weight.data.abs_()
    one.verify("ep=2", 1)


def without_the_last(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    counts = torch.bincount(chosen[:, 0], minlength=EXPERTS).tolist()
    pieces = x.split(counts)
    return x[: len(torch.cat(pieces[:-1]))]


def turned_round(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    counts = torch.bincount(chosen[:, 0], minlength=EXPERTS).tolist()
    return x + torch.cat(x.split(counts)[::-1])


@pytest.mark.matrix(quick=4)
@pytest.mark.parametrize(
    "add", [*OTHERWISE, without_the_last, turned_round, of_a_table]
)
def test_pieces_that_are_joined_otherwise_are_refused(
    add: Callable[..., Tensor],
) -> None:
    with pytest.raises(CaptureError) as refused:
        case(of_all, add).trace()
    assert "loops_of_pieces.py" in str(refused.value) or __name__ in str(refused.value)
    assert refused.value.fix


def test_layers_may_be_of_two_stages() -> None:
    one = case(of_all, in_two_steps, in_two_steps)
    one.verify("pp=2,ep=2", 2)


def test_a_large_plan_is_proved_small() -> None:
    """What is sorted is as long as it was, in any size."""
    one = case(of_all, put_back)
    ids = torch.zeros(96, 128, dtype=torch.long)
    batch = dict.fromkeys(one.batch, ids)
    traced = trace(one.model.to("meta"), batch)
    program = compile_program(traced, make_plan("dp=2,ep=3"))
    small = make_small(program, one.model, batch)
    assert small.sizes[Extent(128)] < 128 and len(small.program.mesh.axes) == 2
