"""Experts that are modules, called in a loop: one product of all, which ep splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops_of_experts import (
    BATCHED,
    DIFFERING,
    REFUSED,
    by_name,
    one_weight,
    other_numbers,
    with_dropout,
)
from loops_of_numbers import COUNTING, PRESENT
from losses_of_rows import of_all
from models import VOCAB
from models_of_rows import (
    EXPERTS,
    WIDTH,
    case,
    copies,
    if_any,
    in_place,
    listed,
    of_a_view,
    of_samples,
    one_hot,
    scattered,
)
from torch import Tensor, nn

from autopar.passes.builder import Builder
from autopar.passes.capture.rows.choices import Match, find_match
from autopar.passes.errors import CaptureError
from autopar.passes.graph import Location
from autopar.runtime.agreement.updates import Updates
from autopar.training.data.feed import vocab_of

LOOPS = (
    in_place, one_hot, copies, of_samples, scattered, of_a_view, listed, if_any,
    *BATCHED,
)  # fmt: skip
MESHES: list[tuple[str, int, dict[str, Any]]] = [
    ("ep=2", 2, {}),
    ("ep=2,tp=2", 1, {}),
    ("dp=2,ep=2", 1, {"zero": 1}),
    ("ep=2", 1, {"zero": 3}),
    ("dp=2", 2, {"zero": 2}),
    ("cp=2,tp=2", 1, {}),
]


@pytest.mark.matrix(quick=2, daily=38)  # each loop on one mesh at least
@pytest.mark.parametrize("add", LOOPS)
@pytest.mark.parametrize(("mesh", "microbatches", "options"), MESHES)
def test_loss_and_gradients_are_the_model_s(add, mesh, microbatches, options) -> None:
    case(of_all, add).verify(mesh, microbatches, **options)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("precision", ["bf16", "bf16-stream", "fp16"])
def test_in_half_precision(precision: str) -> None:
    one = case(of_all, in_place)
    one.model.float()
    one.verify("dp=2,ep=2", 1, precision=precision)


@pytest.mark.matrix(quick=6)
@pytest.mark.parametrize("add", LOOPS)
def test_all_experts_are_one_parameter(add: Callable[..., Tensor]) -> None:
    one = case(of_all, add)
    traced = one.trace()
    shapes = {v.name: v.shape for v in traced.graph.params}
    assert shapes["layers.0.experts[0:3].1.weight"] == (EXPERTS, 48, WIDTH)
    assert not any("experts.0.1" in name for name in shapes)
    assert not traced.remarks
    own = dict(one.model.named_parameters())
    assert {n: v.shape for n, v in traced.parameters.items()} == {
        n: tuple(own[n].shape) for n in traced.parameters
    }


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("add", PRESENT)
def test_numbers_that_there_are_may_be_gone_through(add: Callable[..., Tensor]) -> None:
    """As if all were, since those that are not add nothing."""
    one = case(of_all, add)
    with torch.no_grad():  # an expert that nobody chooses
        one.model.layers[0].router.weight[1] = -100 * one.model.embed.weight.mean(0)
    one.model.embed.weight.data.abs_()
    traced = one.trace()
    assert traced.joined and not traced.remarks
    one.verify("ep=2", 1)


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("add", COUNTING)
def test_numbers_that_there_are_may_not_be_counted(add: Callable[..., Tensor]) -> None:
    one = case(of_all, add)
    with pytest.raises(CaptureError, match=r"how many rows \.(unique|nonzero)\(\)"):
        one.trace()


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("add", DIFFERING)
def test_turns_that_differ_stay_as_they_are(add: Callable[..., Tensor]) -> None:
    one = case(of_all, add)
    traced = one.trace()
    assert not traced.joined and "each turn of the loop" in traced.remarks[0]
    if add is other_numbers:
        assert "(turns differ: 'mul' at loops_of_experts.py" in traced.remarks[0]
    one.verify("dp=2", 1)


@pytest.mark.parametrize("add", REFUSED)
def test_rows_that_mix_are_refused(add: Callable[..., Tensor]) -> None:
    one = case(of_all, add)
    with pytest.raises(CaptureError, match="work on each row"):
        one.trace()


@pytest.mark.parametrize("mesh", ["ep=2", "dp=2"])
def test_dropout_of_rows_goes_by_the_row(mesh: str) -> None:
    """So it is compared without: one mask for all turns, where a model that runs by
    itself has one for those that each has chosen."""
    one = case(of_all, with_dropout)
    program = one.proved(mesh)
    assert program.joined and program.own_masks and program.has_dropout
    assert program.proof is not None and program.proof.model.by
    one.verify(mesh, 1)


@pytest.mark.parametrize(("mesh", "apart"), [("ep=2", True), ("tp=2", False)])
def test_optimizers_are_told_whether_ranks_have_the_same(mesh, apart) -> None:
    """One that moves tensors between ranks by itself would wait for ever."""
    program = case(of_all, in_place).compile(mesh, 1)
    updates = Updates(program, {}, {}, {}, program.mesh.coords(0))
    assert updates.apart is apart


def test_a_weight_of_two_experts_stays_one() -> None:
    one = case(of_all, one_weight)
    traced = one.trace()
    assert {*traced.joined} == {
        f"layers.0.experts[0:3].3.{kind}" for kind in ("weight", "bias")
    }
    one.verify("ep=2", 1)


def test_experts_with_names_are_in_their_layer() -> None:
    one = case(of_all, by_name)
    layer = one.model.layers[0]
    layer.experts = nn.ModuleDict(
        zip(("of_a", "of_b", "of_c"), layer.experts, strict=True)
    )
    traced = one.trace()
    products = {n.location.module for n in traced.graph.nodes if n.name == "aten.bmm"}
    assert traced.joined and products == {"layers.0.experts"}
    one.verify("ep=2", 1)


def test_a_mask_is_sought_no_further_than_masks_are_made() -> None:
    """Not through all of the model, which may be deeper than calls can be."""
    builder = Builder(set())
    x = builder.value("x", (4,), torch.int64)
    for _ in range(3000):
        x = builder.emit("aten.add.Tensor", (x, 1), x.shape, x.dtype, Location())
    mask = builder.emit("aten.eq.Scalar", (x, 1), x.shape, torch.bool, Location())
    made = {node.out.name: node for node in builder.nodes}
    assert find_match(mask, made) == Match(x, (((1, 4),),), 1)


def test_weights_that_were_put_aside_are_as_they_were() -> None:
    """While others are in their place, which rows are computed with."""
    one = case(of_all, in_place)
    step = one.step()
    loss, parameters = step.evaluate(**one.batch), list(step.parameters())
    aside = [p.data for p in parameters]
    for p in parameters:
        p.data = p.data / 2
    assert (loss - step.evaluate(**one.batch)).abs() > 0.1
    for p, values in zip(parameters, aside, strict=True):
        p.data = values
    assert loss == step.evaluate(**one.batch)


def test_what_experts_have_a_vector_of_is_no_vocabulary() -> None:
    program = case(of_all, in_place).compile("ep=2", 1)
    norms = program.tensors["layers.0.experts[0:3].0.weight"]
    assert "vocab" not in norms.pattern and vocab_of(program) == VOCAB


def test_plans_name_products_and_weights_of_all_experts() -> None:
    one = case(of_all, in_place)
    name = "layers.0.experts[0:3].1:autopar.expert_linear"
    for weight in ("layers.0.experts[0:3].1.weight", "layers.*.experts.*.1.weight"):
        program = one.compile(
            "tp=2",
            1,
            op_shardings={"tp": {name: "ffn"}},
            hints={weight: "ffn/tp"},
        )
        weights = program.tensors["layers.0.experts[0:3].1.weight"]
        assert weights.pattern == "experts ffn/tp embed"
