"""Alternatives to the rule of an op: a plan may name them, and a search weighs them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from models import mixture, plain_gpt
from op_shardings import CLUSTER, seconds_of

from autopar.options import make_plan
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.mesh import usual_split
from autopar.passes.plan import CONTEXT_PARALLEL, PlanError
from autopar.passes.price.price_layers import price_layers
from autopar.passes.search.choose_op_shardings import AxisShardings, ShardingsDoNotFit
from autopar.passes.shard.plan_shardings import name_ops
from autopar.planner.planner import ShortModel, capture_short, open_ops
from autopar.planner.request import PlanRequest
from examples.gpt import GPT, Config

ATTENTION = "blocks.*.attention:autopar.attention"


@cache
def long_sequence() -> ShortModel:
    """Fewer heads than ranks, so that only rows and keys can be split by all."""
    with torch.device("meta"):
        model = GPT(Config(4, width=1024, heads=2, context=16384, vocab=512))
    ids = torch.zeros(1, 16384, dtype=torch.int64)
    return capture_short(model, {"ids": ids, "labels": ids.clone()})


def sharded(
    method: str = "gather", memory: float | None = None, decided: bool = False
) -> AxisShardings:
    """The op shardings of cp; their price is that of the program that they make."""
    of, plan = long_sequence(), make_plan("cp=8", context_parallel=method)
    chosen = open_ops(of, plan, CLUSTER, decided).choose(memory)
    prices = price_layers(of.named, chosen.of_graph, of.starts, CLUSTER.device, False)
    account, link = prices.stage(True, 4, True), CLUSTER.link(plan.mesh, ("cp",))
    shardings = chosen.by_axis["cp"]
    assert shardings.communication == pytest.approx(seconds_of(account, "cp", link))
    held = 4 * account.held.parameters + account.residuals
    assert shardings.memory == pytest.approx(held, rel=0.001)
    return shardings


@pytest.mark.slow
def test_keys_are_passed_round_where_all_of_them_do_not_fit() -> None:
    gathered, ring = sharded(), sharded("ring")
    assert gathered.op_shardings[ATTENTION] == "seq"
    assert ring.op_shardings[ATTENTION] == "ring:seq"  # as it was demanded
    assert gathered.seconds < ring.seconds and ring.memory < 0.8 * gathered.memory
    less = 0.95 * gathered.memory
    chosen = sharded(memory=less)
    assert chosen.op_shardings[ATTENTION] == "ring:seq" and chosen.memory <= less
    with pytest.raises(ShardingsDoNotFit):
        sharded(memory=less, decided=True)  # keys were to be gathered


def test_a_planner_leaves_attention_as_an_option_says() -> None:
    decided = PlanRequest(CLUSTER, options={"context_parallel": "gather"})
    left_open = PlanRequest(CLUSTER, options={"context_parallel": "auto"})
    assert decided.fixes_attention and not left_open.fixes_attention


def test_one_attention_is_a_ring_and_another_gathers() -> None:
    case = plain_gpt(layers=2).double()
    name = "blocks.1.attention:autopar.attention"
    options = {"zigzag": ("cp",), "op_shardings": {"cp": {name: "ring:seq"}}}
    moved = {
        (c.part, c.kind): c.calls for c in case.compile("cp=3", **options).communication
    }
    assert moved["forward", "shift"] == 2 and moved["forward", "all_gather"] == 2
    case.verify("cp=3", **options)


def test_of_rings_one_attention_gathers_if_the_plan_says_so() -> None:
    case = plain_gpt(layers=2).double()
    split = {**usual_split(), "cp": CONTEXT_PARALLEL["ring"]}
    shardings = {"cp": {"blocks.1.attention:autopar.attention": "seq"}}
    program = case.compile("cp=3", split=split, op_shardings=shardings)
    moved = {(c.part, c.kind): c.calls for c in program.communication}
    assert moved["forward", "shift"] == 2 and moved["forward", "all_gather"] == 2
    case.verify("cp=3", split=split, op_shardings=shardings)


def test_a_ring_is_no_other_axis_s_too() -> None:
    case = plain_gpt(layers=1)
    shardings = {axis: {ATTENTION: "ring:seq"} for axis in ("cp", "tp")}
    with pytest.raises(PlanError, match=r"'ring:seq' of 'tp' asks") as raised:
        case.compile("cp=2,tp=2", op_shardings=shardings)
    assert "it may be batch, heads, seq, or null" in str(raised.value)


@pytest.mark.slow
def test_rows_go_to_their_experts_as_a_plan_says_of_an_op() -> None:
    """What ep prefers is an alternative, which a plan may name for one op."""
    case = mixture("mixtral").double()
    names = name_ops(normalize(case.trace()).graph)
    products = [str(name) for name in names if "expert_linear" in name.op]
    options = {
        "split": {**usual_split(), "ep": ("weights:experts", "batch")},
        "op_shardings": {"ep": dict.fromkeys(products, "routed:experts")},
    }
    by_name, usual = case.compile("ep=2", **options), case.compile("ep=2")
    assert by_name.communication == usual.communication
    case.verify("ep=2", **options)
