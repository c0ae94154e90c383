"""ep: experts are split where tokens meet their weights, samples everywhere else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from cases import Case
from models import WIDTH, mixture, plain_gpt, switch_gpt

from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.dims.name_dims import name_dims
from autopar.passes.errors import LossNotSeparable
from autopar.passes.program import Program

SAMPLES, SEQ = 8, 16


# --- Switch layers in plain PyTorch -------------------------------------------------

MESHES: list[tuple[str, int, dict[str, Any]]] = [
    ("ep=2", 1, {}),
    ("ep=4", 2, {}),
    ("dp=2,ep=2", 2, {"zero": 3}),
    ("ep=2,dp=2", 1, {"zero": 1}),
    ("ep=2,tp=2", 1, {}),
    ("pp=2,ep=2", 4, {"schedule": "zb-h1"}),
    ("pp=2,ep=2,tp=2", 2, {"recompute": "full"}),
    ("cp=2,ep=2", 1, {}),
    ("pp=2", 2, {"schedule": "gpipe"}),
]


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(("mesh", "microbatches", "options"), MESHES)
def test_loss_and_gradients_are_the_model_s(mesh, microbatches, options, top_k) -> None:
    switch_gpt(top_k=top_k).double().verify(mesh, microbatches, **options)


@pytest.mark.slow
def test_experts_that_do_not_divide() -> None:
    switch_gpt(experts=7).double().verify("ep=2", 2)


def test_some_tokens_are_dropped_by_some_experts() -> None:
    case = switch_gpt()
    layer = case.model.blocks[0].experts
    x = torch.randn(SAMPLES, SEQ, WIDTH)
    choices = torch.nn.functional.one_hot(
        layer.router(x).topk(1).indices, layer.config.experts
    )
    placed = layer._places(choices).any(-1)
    assert 0.2 < placed.float().mean() < 0.9


def on_ep(program: Program) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for c in program.communication:
        if "ep" in c.axes:
            found[c.part, c.kind] += c.calls
    return found


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_layer_exchanges_tokens_twice_each_way_and_nothing_else(top_k) -> None:
    more, fewer = (
        on_ep(switch_gpt(layers, top_k).compile("ep=2")) for layers in (3, 2)
    )
    assert more - fewer == {
        ("forward", "all_to_all"): 2,
        ("backward", "all_to_all"): 2,
    }


def test_each_rank_holds_its_experts_alone() -> None:
    parameters = switch_gpt().compile("ep=4").parameters
    assert parameters["blocks.0.experts.up"].pattern == "experts/ep embed ffn"
    assert parameters["blocks.0.experts.down"].pattern == "experts/ep ffn embed"
    assert parameters["blocks.0.experts.up"].pending == ()
    assert parameters["blocks.0.experts.router.weight"].pending == ("ep",)


def test_the_balance_loss_travels_from_stage_to_stage() -> None:
    program = switch_gpt().compile("pp=2", 2)
    (text,) = {program.modules[k] for k in program.stages[1].modules.values()}
    (received,) = (x for x in text.splitlines() if x.startswith("RECEIVES = "))
    assert received.count("torch.float32") == 2
    assert "((), torch.float32)" in received


def test_places_of_experts_are_not_taken_for_heads() -> None:
    named = name_dims(normalize(switch_gpt().trace()))
    sizes = {
        dim.size
        for dims in named.dims.values()
        for factors in dims
        for dim in factors
        if dim.name == "head_dim"
    }
    assert sizes == {WIDTH // 4}


def test_tensor_parallel_ranks_split_each_expert() -> None:
    parameters = switch_gpt().compile("ep=2,tp=2").parameters
    assert parameters["blocks.0.experts.up"].pattern == "experts/ep embed ffn/tp"


def test_without_experts_the_axis_is_one_of_data() -> None:
    case = plain_gpt().double()
    case.verify("ep=2", 2)
    (note,) = case.compile("ep=2").remarks
    assert note == "ep splits no experts: only samples, as dp does"
    assert not any("ep splits" in note for note in switch_gpt().compile("ep=2").remarks)


# --- Hugging Face's experts ---------------------------------------------------------

NAMES = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"]


@pytest.mark.matrix(quick=2, daily=11)
@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2", "ep=2,tp=2", "pp=2,ep=4"])
@pytest.mark.parametrize("name", NAMES)
def test_mixtures_as_they_are_shipped(name, mesh) -> None:
    mixture(name).double().verify(mesh, 2)


def test_no_rank_holds_a_weight_for_every_token() -> None:
    program = mixture("mixtral").compile("ep=2")
    assert "expert_linear" in "".join(program.modules.values())
    footprint = program.stages[0].footprint
    per_token = 8 * SEQ * 2 * 2 * 48 * WIDTH * 4  # tokens, top_k, gate and up, bytes
    assert max(footprint.forward_peak, footprint.backward_peak) < per_token
    spec = program.parameters["model.layers.0.mlp.experts.gate_up_proj"]
    assert spec.pattern == "experts/ep (2 ffn) embed"


@pytest.mark.slow
def test_weights_that_are_turned_before_their_product_are_split_too() -> None:
    parameters = mixture("gpt_oss").compile("ep=2").parameters
    for name in ("gate_up_proj", "down_proj"):
        spec = parameters[f"model.layers.1.mlp.experts.{name}"]
        assert spec.pattern.startswith("experts/ep ") and spec.pending == ()


def balanced_mixture() -> Case:
    """With the balance loss that the model itself adds, in the precision it insists on.

    Its factors are sums over all tokens of the batch."""
    case = mixture("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    batch = {"input_ids": case.batch["input_ids"], "labels": case.batch["labels"]}
    return Case(case.model, batch)


@pytest.mark.slow
def test_a_balance_loss_over_the_whole_batch() -> None:
    balanced_mixture().verify("dp=2")
    balanced_mixture().verify("pp=2,ep=2")


def test_a_balance_loss_over_the_whole_batch_needs_all_of_it_at_once() -> None:
    with pytest.raises(LossNotSeparable, match="only its share of this") as caught:
        balanced_mixture().compile("dp=2", 2)
    assert "modeling_mixtral.py" in str(caught.value)
    assert "microbatches=1" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_that_are_hit_are_as_those_that_are_looked_up(name: str) -> None:
    """The library's own loop over experts that have tokens."""
    case = mixture(name, experts_implementation="eager")
    looked_up = mixture(name, experts_implementation="batched_mm")
    plain, other = case.compile("ep=2,tp=2"), looked_up.compile("ep=2,tp=2")
    assert {name: v.pattern for name, v in plain.tensors.items()} == {
        name: v.pattern for name, v in other.tensors.items()
    }
    case.verify("ep=2")


@pytest.mark.slow
def test_experts_that_sort_all_tokens_are_split() -> None:
    case = mixture("mixtral", experts_implementation="grouped_mm")
    parameters = case.compile("ep=2,tp=2").parameters
    for name, split in (
        ("gate_up_proj", "experts/ep (2 ffn/tp) embed"),
        ("down_proj", "experts/ep embed ffn/tp"),
    ):
        assert parameters[f"model.layers.0.mlp.experts.{name}"].pattern == split
    case.verify("ep=2,tp=2")
