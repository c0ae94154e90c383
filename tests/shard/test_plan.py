"""A plan is data: what is read back is what was written, and compiles to the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cases import plan
from models import plain_gpt

from autopar.passes.mesh import TIME
from autopar.passes.plan import Plan, PlanError

PLANS = [
    plan("tp=2"),
    plan("pp=2,dp=2,tp=2", 4, sequence_parallel=False, schedule="gpipe"),
    plan("dp=4,pp=2", hints={"*.mlp.up.weight": "ffn/tp"}, cuts=("add_3",)),
    plan("pp=2", 4, stages_per_rank=2),
    plan("dp=2,tp=2", zero=3),
    plan("dp=2,fsdp=2", zero=3, offload=True),
    plan("pp=2", 4, schedule="auto", memory=1 << 30, recompute="auto"),
    plan("pp=2", 4, recompute_layers={"blocks.0": "full"}),
]


@pytest.mark.parametrize("written", PLANS, ids=lambda p: str(p.mesh))
def test_a_plan_reads_back(written):
    assert Plan.from_json(written.to_json()) == written


def changed(**keys: Any) -> str:
    return json.dumps({**json.loads(plan("pp=2,tp=2", 2).to_json()), **keys})


def without(key: str) -> str:
    data = json.loads(plan("pp=2,tp=2", 2).to_json())
    del data[key]
    return json.dumps(data)


BROKEN = {
    "{": "is not JSON",
    "[1]": "is not a JSON object",
    "{}": "is not of format 1",
    changed(format=2): "is not of format 1",
    changed(color="red"): "unknown key 'color'",
    changed(microbatches=0): "microbatches=0",
    changed(microbatches="two"): "'microbatches' in the plan is 'two'",
    changed(microbatches=2.5): "'microbatches' in the plan is 2.5",
    changed(split=["tp"]): r"'split' in the plan is \['tp'\]",
    changed(split={"tp": "heads"}): "'tp' in 'split' in the plan is 'heads'",
    changed(split={"xp": ["heads"]}): "'split' in the plan has 'xp'",
    changed(schedule="zigzag"): "no schedule is named 'zigzag'",
    changed(stages_per_rank=0): "stages_per_rank=0",
    changed(cuts="add_1"): "'cuts' in the plan is 'add_1'",
    changed(hints=[]): r"'hints' in the plan is \[\]",
    changed(zero=4): "zero=4",
    changed(zigzag="cp"): "'zigzag' in the plan is 'cp'",
    changed(zigzag=["pp"]): "zigzag has 'pp', which splits no sequence",
    changed(zigzag=["dp"]): "zigzag has 'dp', which splits no sequence",
    changed(offload=1): "'offload' in the plan is 1",
    changed(memory=-1): "memory=-1",
    changed(recompute="auto"): 'recompute="auto" needs to know',
    changed(recompute_layers={"h.0": "some"}): r"recompute_layers\['h.0'\]='some'",
    without("mesh"): "has no mesh",
}


@pytest.mark.parametrize(("text", "says"), BROKEN.items(), ids=BROKEN.values())
def test_a_broken_plan_says_what_is_wrong(text, says):
    with pytest.raises(PlanError, match=says):
        Plan.from_json(text)


def test_parameters_rest_split_over_data_parallel_ranks():
    assert plan("pp=2,dp=2,tp=2", 4, zero=3).parameter_axes == ("dp",)
    assert plan("dp=1,tp=2", zero=3).parameter_axes == ()
    assert plan("dp=2").parameter_axes == ()
    assert plan("dp=2,cp=2,tp=2", zero=1).parameter_axes == ("dp", "cp")


def test_on_a_hybrid_mesh_dp_replicates_what_fsdp_shares():
    assert plan("dp=2,fsdp=4", 2, zero=3).parameter_axes == ("fsdp",)
    assert plan("fsdp=4,cp=2,tp=2", zero=1).parameter_axes == ("fsdp", "cp")
    assert plan("dp=2,fsdp=4", zero=3).data_axes == ("dp", "fsdp")


@pytest.mark.parametrize(
    ("mesh", "zero", "says"),
    [
        ("pp=2,tp=2", 1, "has no axis whose ranks hold the same parameters"),
        ("", 3, "has no axis"),
        ("dp=2,fsdp=2", 0, "has an axis fsdp, but zero=0 shares nothing out"),
    ],
)
def test_shares_need_ranks_that_share(mesh, zero, says):
    with pytest.raises(PlanError, match=says):
        plan(mesh, zero=zero)


def test_axes_of_one_rank_split_nothing():
    assert plan("dp=1,pp=2,tp=2").axes == ("tp",)
    assert plan("pp=2,dp=2", 4).axes == (TIME, "dp")
    assert plan("pp=2,dp=2", 4).data_axes == (TIME, "dp")


@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "pp=4,dp=2"])
def test_the_cuts_that_were_chosen_compile_to_the_same_program(mesh):
    case = plain_gpt()
    first = case.compile(mesh, 2)
    assert len(first.plan.cuts) == first.plan.stages - 1
    again = case.compile(mesh, 2, cuts=Plan.from_json(first.plan.to_json()).cuts)
    assert again.modules == first.modules
    assert again.stages == first.stages
    assert again.plan == first.plan


def test_compiling_twice_gives_the_same_text():
    assert plain_gpt().compile("pp=2,tp=2").modules == (
        plain_gpt().compile("pp=2,tp=2").modules
    )
