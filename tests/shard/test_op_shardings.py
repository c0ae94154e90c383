"""Labels of single ops: what they cost, the best of them, and plans that have them."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import gpt2, llama, plain_gpt
from op_shardings import (
    CLUSTER,
    choices_of,
    communication_of,
    compiled,
    large,
    seconds_of,
    setting_of,
    tp,
)
from plans import model_file
from processes import run_ranks
from torch import nn

import autopar
from autopar.cli import main
from autopar.options import make_plan
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.capture.trace import trace
from autopar.passes.dims.name_dims import name_dims
from autopar.passes.dims.origins import Origin
from autopar.passes.mesh import usual_split
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import CONTEXT_PARALLEL, Plan, PlanError, Preference
from autopar.passes.price.cluster import PLAIN
from autopar.passes.price.price_layers import price_layers
from autopar.passes.read_program import read_program
from autopar.passes.search.choose_op_shardings import Axis, ShardingsDoNotFit
from autopar.passes.search.least_cost import least_cost
from autopar.passes.search.op_sharding_costs import OpShardingCosts
from autopar.passes.shard.op_sharding import PASS
from autopar.passes.shard.plan_shardings import OpName, fold, name_ops, sharding_text
from autopar.passes.shard.propagate import propagate
from autopar.planner.planner import open_ops
from autopar.verify import verify

# --- What labels cost ----------------------------------------------------------------


def drawn(costs: OpShardingCosts, seed: int) -> dict[str, str | None]:
    """Any label for each op."""
    draw, names = random.Random(seed), name_ops(costs.named.graph)
    found = {}
    for i, node in enumerate(costs.nodes):
        if costs.named.origins[node.results[0].name] & Origin.PARAM:
            choice = draw.choice([c for c in costs.choices[i] if c.op_sharding != PASS])
            found[str(names[i])] = sharding_text(
                costs.named.factors[i], choice.op_sharding
            )
    return found


@pytest.mark.matrix(quick=1, daily=6)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("mesh", "axis"), [("tp=2", "tp"), ("cp=3", "cp"), ("dp=2,tp=2", "tp")]
)
@pytest.mark.parametrize("build", [plain_gpt, gpt2, llama])
def test_any_labels_are_right_and_cost_what_their_program_does(
    build, mesh, axis, seed
) -> None:
    case = build(layers=2)
    traced = case.trace()
    named = name_dims(normalize(traced))
    setting = setting_of(named, make_plan(mesh), axis)
    costs = OpShardingCosts(setting)
    plan = replace(make_plan(mesh), op_shardings={axis: drawn(costs, seed)})
    priced = communication_of(costs, choices_of(costs, propagate(named, plan), axis))
    found = seconds_of(compiled(named, plan), axis, setting.link)
    assert priced == pytest.approx(found, rel=1e-9)
    program = compile_program(traced, plan, PLAIN)
    verify(program, case.model, case.batch, case.loss_fn, seed=3).check()


class Small(nn.Module):
    """A block of few ops, so that all labels can be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.tanh(self.up(x)))).sum()


@pytest.mark.parametrize("byte", [0.0, 1e-9, 1e-6])
def test_the_best_labels_as_by_trying_all(byte: float) -> None:
    traced = trace(Small(), {"x": torch.randn(4, 4)}, lambda out, _: out)
    named = name_dims(normalize(traced))
    axis = Axis(setting_of(named, tp(2)))
    tables = [amounts.weigh(byte) for amounts in axis.costs.tables]
    sizes = [len(own) for own in axis.costs.choices]
    least = min(
        sum(float(t.costs[tuple(choices[i] for i in t.variables)]) for t in tables)
        for choices in itertools.product(*map(range, sizes))
    )
    assert 0 < least < math.inf and math.prod(sizes) > 300
    assert least_cost(tables, sizes).cost == pytest.approx(least, rel=1e-12)


@pytest.mark.matrix(quick=0, daily=1)
@pytest.mark.parametrize("build", [llama, plain_gpt])
def test_a_deep_model_is_labelled_as_its_whole_graph_would_be(build) -> None:
    case = build(layers=6)
    of = case.short()
    whole = name_dims(normalize(case.trace()))
    for byte in (0.0, 1e-9, 1e-7):
        short = Axis(setting_of(of.named, tp(2)), of.layers).best(byte)
        full = Axis(setting_of(whole, tp(2))).best(byte)
        cost = [x.seconds + byte * x.memory for x in (short, full)]
        assert cost[0] == pytest.approx(cost[1], rel=1e-9)
        propagate(whole, replace(tp(2), op_shardings={"tp": short.op_shardings}))


# --- What comes out ------------------------------------------------------------------


@pytest.mark.slow
def test_megatron_comes_out_where_parameters_must_be_split() -> None:
    """Tensor (Shoeybi 2019) and sequence parallelism (Korthikanti 2022)."""
    of, plan = large(), tp(8)
    found = open_ops(of, plan, CLUSTER).choose(9e9)
    labels = found.plan.op_shardings["tp"]
    by_dim = {
        "heads": ("attention.qkv:linear", "attention.qkv:add", "attention.proj:linear",
                  "attention:autopar.attention"),
        "ffn": ("mlp.up:linear", "mlp.up:add", "mlp:gelu", "mlp.down:linear"),
        "seq": ("norm1:layer_norm", "norm2:layer_norm", "mlp.down:add",
                "attention.proj:add"),
    }  # fmt: skip
    for dim, ops in by_dim.items():
        assert {op: labels[f"blocks.*.{op}"] for op in ops} == dict.fromkeys(ops, dim)
    assert labels["blocks.*:add"] == labels["blocks.*:add.1"] == "seq"
    assert labels["head:linear"] == labels["tokens:embedding"] == "vocab"
    layer = price_layers(
        of.named, found.of_graph, of.starts, CLUSTER.device, False
    ).more
    assert layer is not None
    for part in ("forward", "backward"):
        calls = {e.kind: e.calls for e in layer.microbatch[part].exchanges if e.calls}
        assert calls == {"all_gather": 2, "reduce_scatter": 2}, part


@pytest.mark.slow
def test_what_fits_is_data_parallel() -> None:
    of = large(samples=64)
    plan = open_ops(of, tp(8, microbatches=4), CLUSTER).choose().plan
    own = plan.op_shardings["tp"]
    layer = {dim for op, dim in own.items() if op.startswith("blocks.*")}
    assert layer == {"batch"}


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("limit", [80e9, 9e9, 7e9])
def test_the_price_is_that_of_the_program(limit: float) -> None:
    of, plan = large(), tp(8)
    found = open_ops(of, plan, CLUSTER).choose(limit)
    account = price_layers(
        of.named, found.of_graph, of.starts, CLUSTER.device, False
    ).stage(True, 24, True)
    link = CLUSTER.link(plan.mesh, ("tp",))
    labelling = found.by_axis["tp"]
    assert labelling.communication == pytest.approx(
        seconds_of(account, "tp", link), rel=1e-9
    )
    held = 4 * account.held.parameters + account.residuals
    assert labelling.memory == pytest.approx(held, rel=0.01)
    assert labelling.memory <= limit


@pytest.mark.slow
def test_less_memory_takes_longer_until_nothing_fits() -> None:
    limits = (80e9, 9.9e9, 9e9, 7e9)
    took = [
        open_ops(large(), tp(8), CLUSTER).choose(limit).by_axis["tp"].seconds
        for limit in limits
    ]
    assert took == sorted(took) and took[0] < took[-1]
    with pytest.raises(ShardingsDoNotFit, match="and has 1 GB"):
        open_ops(large(), tp(8), CLUSTER).choose(1e9)
    with pytest.raises(PlanError, match="needs 16 devices"):
        open_ops(large(), tp(16), CLUSTER).choose()


# --- Plans ---------------------------------------------------------------------------


def frugal(case, mesh: str, **options) -> Plan:
    """With labels that need about as little memory as any."""
    of, plan = (
        case.short(),
        make_plan(mesh, **options),
    )
    found = Axis(setting_of(of.named, plan), of.layers).best(1e-6)
    return replace(plan, op_shardings={"tp": found.op_shardings})


@pytest.mark.slow
@pytest.mark.matrix(quick=0, daily=4)
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "pp=2,tp=2", "cp=2,tp=2"])
@pytest.mark.parametrize("build", [plain_gpt, gpt2, llama])
def test_plans_with_labels_are_right(build, mesh) -> None:
    case = build(layers=4)
    plan = frugal(case, mesh, microbatches=2)
    assert Plan.from_json(plan.to_json()) == plan
    program = compile_program(case.trace(), plan, PLAIN)
    assert any("tp" in axes for p in program.parameters.values()
               for dim in p.slots for axes in dim)  # fmt: skip
    verify(program, case.model, case.batch, case.loss_fn, seed=3).check()


@pytest.mark.matrix(quick=0, daily=1)
@pytest.mark.parametrize("build", [llama, plain_gpt])
def test_several_axes_are_labelled_in_turn(build) -> None:
    case = build(layers=4)
    of = case.short()
    plan = open_ops(of, make_plan("cp=2,tp=2", microbatches=2), CLUSTER).choose().plan
    assert set(plan.op_shardings) == {"cp", "tp"}
    traced = case.trace()
    program = compile_program(traced, plan, PLAIN)
    verify(program, case.model, case.batch, case.loss_fn, seed=3).check()


def gradients(plan: Plan | None) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and the weights after a step down the gradients."""
    case = plain_gpt().double()
    mesh = plan.mesh if plan else "tp=1"
    step = autopar.compile(case.model, mesh, plan=plan, example_inputs=case.batch)
    loss = step(**case.batch)
    torch.optim.SGD(step.parameters(), lr=1.0).step()
    return float(loss), step.state_dict()


@pytest.mark.slow
def test_on_processes_the_result_is_that_of_one() -> None:
    loss, weights = gradients(None)
    plan = frugal(plain_gpt(), "dp=2,tp=2", microbatches=2)
    for got, found in run_ranks(gradients, 4, plan):
        assert got == pytest.approx(loss, rel=1e-9)
        for name, want in weights.items():
            torch.testing.assert_close(found[name], want, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_command_line(tmp_path, capsys) -> None:
    compile_ = ["compile", model_file(tmp_path), "--mesh", "tp=2", "-o"]
    first, again = str(tmp_path / "first"), str(tmp_path / "again")
    assert main([*compile_, first, "--op-shardings", "2xA100-80GB"]) == 0
    capsys.readouterr()
    assert main(["inspect", first]) == 0
    assert "op shardings: what an axis splits of an op" in capsys.readouterr().out
    assert main(["inspect", first, "--json"]) == 0
    assert (
        "blocks.*.mlp.up:linear"
        in json.loads(capsys.readouterr().out)["op_shardings"]["tp"]
    )
    saved = f"{first}/plan.json"
    assert main(["compile", compile_[1], "--plan", saved, "-o", again]) == 0
    assert (tmp_path / "again" / "plan.json").read_text() == Path(saved).read_text()
    few = ["--op-shardings", "2xA100-80GB", "--memory", "1KiB"]
    assert main([*compile_, again, *few]) == 2
    assert "whatever 'tp' splits" in capsys.readouterr().err
    assert main([*compile_, again, "--op-shardings", "1xA100-80GB"]) == 2
    assert "needs 2 devices" in capsys.readouterr().err


def test_layers_alike_are_written_once() -> None:
    labels = {"h.0.up:linear": "ffn", "h.1.up:linear": "ffn", "h.2.up:linear": None,
              "head:linear": "vocab"}  # fmt: skip
    assert fold({OpName.parse(text): label for text, label in labels.items()}) == {
        "h.*.up:linear": "ffn", "h.2.up:linear": None, "head:linear": "vocab",
    }  # fmt: skip


WRONG = {
    "blocks.*.mlp.up:liner": ("ffn", "name 'blocks.*.mlp.up:liner'"),
    "blocks.*.mlp.up:linear": ("heads", "cannot be split along"),
    "blocks.7.mlp.up:linear": ("ffn", "name 'blocks.7.mlp.up:linear'"),
}


@pytest.mark.parametrize("op", WRONG)
def test_labels_that_are_wrong(op) -> None:
    dim, message = WRONG[op]
    with pytest.raises(PlanError, match=message.replace("*", r"\*")) as caught:
        plain_gpt().compile("tp=2", op_shardings={"tp": {op: dim}})
    assert "fix" in str(caught.value)


@pytest.mark.parametrize("labels", [{"time": {}}, {"pp": {}}, {"tp": {"x": 1}}])
def test_labels_that_cannot_be_read(labels: Any) -> None:
    data = {**json.loads(tp(2).to_json()), "op_shardings": labels}
    with pytest.raises(PlanError, match="'op_shardings' in the plan"):
        Plan.from_json(json.dumps(data))


def test_what_was_written_by_former_names_is_read() -> None:
    program = plain_gpt(1).compile("tp=2", op_shardings={"tp": {"head:linear": None}})
    plan = program.plan.to_json()
    former = plan.replace('"op_shardings"', '"labels"')
    assert former != plan and Plan.from_json(former) == program.plan
    text = program.to_json()
    old = text.replace('"remarks"', '"notes"').replace('"exposed"', '"waits"')
    assert old != text
    read = read_program(old, program.plan, program.modules)
    assert read.to_json() == text


@pytest.mark.parametrize("text", ["blocks.3.mlp.up:linear", "blocks.*:add.1", ":sum"])
def test_names_of_ops_parse_as_they_print(text: str) -> None:
    assert str(OpName.parse(text)) == text


@pytest.mark.parametrize("axis", usual_split())
def test_preferences_parse_as_they_print(axis: str) -> None:
    texts = (
        *usual_split()[axis],
        *CONTEXT_PARALLEL["ring"],
        *CONTEXT_PARALLEL["ulysses"],
    )
    preferences = [Preference.parse(text) for text in texts]
    assert tuple(map(str, preferences)) == texts
    assert {":" in text for text in texts} == {bool(p.only) for p in preferences}
