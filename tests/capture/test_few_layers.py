"""Layers that repeat are lowered once: the lowered graph is that of passes on all."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from cases import Case
from models import cut_gpt, gpt2, llama, mixture, plain_gpt
from test_repeat_layers import Layers, batch, draw
from torch import Tensor

from autopar.options import make_plan
from autopar.passes.capture.trace import trace
from autopar.passes.errors import AutoparError, LossNotSeparable
from autopar.passes.graph import Value
from autopar.passes.pipeline import compile_program, lower, lower_few
from autopar.passes.price.cluster import PLAIN
from autopar.passes.shard.insert_collectives import Lowered

# Dims without a name of their own, and values by which rows are routed.
BY_NUMBER = re.compile(r"\bd\d+\b|by %\w+")


def lines(lowered: Lowered) -> list[str]:
    """All that a lowered graph says, with values that are computed named by their
    order, and literals by their numbers."""
    graph, traced = lowered.graph, lowered.traced
    names = {v.name: v.name for v in graph.sources}
    names |= {v.name: str(traced.literals[v.name].tolist()) for v in graph.constants}

    def note(v: Value) -> str:
        lies, text = lowered.shardings[v.name], BY_NUMBER.sub("", lowered.text(v))
        route = lies.route and replace(lies.route, expert=names[lies.route.expert])
        of = lowered.origins[v.name], v.name in lowered.ahead
        return f"{v.type} {text} {lies.with_route(None)} {route} {of}"

    text = [
        f"{v} {note(v)} {v.name in traced.trainable} {traced.part(v)}"
        for v in (*graph.inputs, *graph.params, *graph.buffers)
    ]
    numbers = itertools.count()
    for node in graph.nodes:
        call = node.substitute(lambda v: replace(v, name=names[v.name]))
        for v in node.results:
            names[v.name] = f"v{next(numbers)}"
        made = [note(v) for v in node.results]
        text.append(f"{made} = {replace(call, outs=())}  {node.location}")
    return [*text, str([names[v.name] for v in graph.outputs])]


def check(case: Case, mesh: str, **options: Any) -> None:
    """It is lowered once, and to what it is without that."""
    plan = make_plan(mesh, **options)
    traced = case.trace(plan.lowering)
    few = lower_few(traced, plan, watch)
    assert few is not None
    lowered, remarks = lower(traced, plan, watch)
    assert lines(few[0]) == lines(lowered)
    assert few[1] == remarks


def watch(name: str, made: object) -> None: ...


def experts(layers: int) -> Case:
    return mixture("mixtral", num_hidden_layers=layers)


def dropping(layers: int) -> Case:
    return gpt2(layers, dropout=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "mesh", "options"),
    [
        (plain_gpt, "dp=2,tp=2", {"microbatches": 2, "zero": 1}),
        (gpt2, "dp=2,tp=2", {"zero": 3, "precision": "bf16"}),
        (llama, "tp=4", {}),
        (llama, "cp=2,tp=2", {}),
        (llama, "cp=2,dp=2", {"context_parallel": "ring", "zero": 2}),
        (cut_gpt, "tp=2", {}),
        (experts, "dp=2,ep=2", {}),
        (experts, "ep=2,tp=2", {"microbatches": 2}),
        (dropping, "pp=2,tp=2", {"microbatches": 2}),
    ],
)
def test_layers_are_lowered_once(build, mesh, options) -> None:
    check(build(layers=8), mesh, **options)


@pytest.mark.slow
def test_what_a_plan_says_of_all_layers() -> None:
    hints = {"*.mlp.c_proj.weight": "embed/tp"}
    check(gpt2(layers=8), "tp=2", hints=hints)


@pytest.mark.slow
def test_a_plan_that_names_a_layer_is_for_all_of_them() -> None:
    plan = make_plan("tp=2", hints={"transformer.h.3.mlp.c_proj.weight": "embed/tp"})
    traced = gpt2(layers=8).trace()
    assert lower_few(traced, plan, watch) is None
    program = compile_program(traced, plan, PLAIN)
    split = [
        name
        for name, spec in program.parameters.items()
        if name.endswith("mlp.c_proj.weight") and "embed/tp" in spec.pattern
    ]
    assert split == ["transformer.h.3.mlp.c_proj.weight"]


@pytest.mark.slow
def test_layers_between_frozen_ones() -> None:
    case = plain_gpt(layers=12)
    for block in [*case.model.blocks][:2]:
        block.requires_grad_(False)
    check(case, "dp=2,tp=2", zero=3)


@pytest.mark.slow
def test_what_reads_all_layers_is_lowered_as_it_is() -> None:
    case = gpt2(layers=8)
    case.model.config.output_hidden_states = True
    plan = make_plan("tp=2")
    traced = trace(case.model, case.batch, case.loss_fn, outputs=("hidden_states.3",))
    assert lower_few(traced, plan, watch) is None


def test_what_is_wrong_is_said_as_it_is_of_all_layers() -> None:
    """What is behind the last layer mixes samples; of few it has another name."""
    case = Case(Layers([""] * 9, mix_in_the_last), batch())
    plan = make_plan("dp=1", microbatches=2)
    assert lower_few(case.trace(), plan, watch) is None
    with pytest.raises(LossNotSeparable) as caught:
        compile_program(case.trace(), plan, PLAIN)
    assert "%add_8" in str(caught.value)


def mix_in_the_last(i: int, x: Tensor) -> Tensor:
    return x - x.softmax(0) if i == 8 else x


@pytest.mark.slow
def test_it_computes_what_the_model_does() -> None:
    experts(layers=7).double().verify("pp=2,ep=2", 2, zero=1)


def check_drawn(seed: int) -> None:
    """Layers of patterns, lowered once or not, are what they are without that."""
    mesh = random.Random(seed).choice(("dp=2", "tp=2", "pp=2,tp=2", "dp=2,tp=2"))
    zero = 3 * (seed % 2) if "dp" in mesh else 0
    plan = make_plan(mesh, microbatches=1 + seed % 2, zero=zero)
    traced = trace(draw(seed), {"tokens": batch()["tokens"].repeat(2, 1)})
    try:
        lowered, remarks = lower(traced, plan, watch)
    except AutoparError:
        assert lower_few(traced, plan, watch) is None
        return
    few = lower_few(traced, plan, watch)
    if few is not None:
        assert lines(few[0]) == lines(lowered)
        assert few[1] == remarks


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("seed", range(8))
def test_drawn_layers(seed) -> None:
    check_drawn(seed)


@pytest.mark.nightly
def test_many_drawn_layers() -> None:
    for seed in range(8, 120):
        check_drawn(seed)
