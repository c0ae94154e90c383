"""The options of `compile` become a plan, or an error that says which one is wrong."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from models import plain_gpt

import autopar
from autopar.options import Options, make_plan
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan, PlanError


def test_what_is_left_out_is_as_a_plan_has_it():
    assert make_plan("dp=2") == Plan(Mesh.parse("dp=2"))


def test_every_option_changes_the_plan():
    changed: dict[str, Any] = {
        "microbatches": 4,
        "schedule": "gpipe",
        "stages_per_rank": 2,
        "sequence_parallel": False,
        "context_parallel": "ulysses",
        "cp_layout": "zigzag",
        "recompute": "full",
        "memory": "16GiB",
        "zero": 3,
        "offload": True,
        "precision": "bf16",
        "tf32": True,
        "backend": "inductor",
        "loss_chunks": 4,
        "hints": {"*.weight": "ffn/tp"},
    }
    assert set(changed) == set(Options.__annotations__)
    usual = make_plan("dp=2")
    for name, value in changed.items():
        option: Any = {name: value}
        assert make_plan("dp=2", **option) != usual, name


@pytest.mark.parametrize(
    ("options", "zigzag"),
    [
        ({}, ("cp",)),
        ({"context_parallel": "ring"}, ("cp",)),
        ({"context_parallel": "ulysses"}, ()),
        ({"cp_layout": "contiguous"}, ()),
        ({"hints": {"*.up.weight": "ffn/cp"}}, ()),
        ({"hints": {"*.up.weight": "ffn/cp"}, "cp_layout": "zigzag"}, ("cp",)),
    ],
)
def test_rows_lie_in_zigzag_where_that_balances_the_work(options, zigzag):
    assert make_plan("cp=2", **options).zigzag == zigzag


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"microbatch": 4}, "there is no option 'microbatch'"),
        ({"context_parallel": "rings"}, "context_parallel='rings'"),
        ({"cp_layout": "striped"}, "cp_layout='striped'"),
        (
            {"context_parallel": "ulysses", "cp_layout": "zigzag"},
            "balances nothing with context_parallel='ulysses'",
        ),
        ({"zero": 4}, "zero=4"),
    ],
)
def test_an_option_that_is_wrong(options, says):
    with pytest.raises(PlanError, match=says):
        make_plan("dp=2", **options)


def test_a_plan_and_an_option_contradict_each_other():
    model = plain_gpt().model
    with pytest.raises(AutoparError, match="the plan is given, and so is zero="):
        autopar.compile(model, "dp=1", plan=Plan(Mesh.parse("dp=1")), zero=3)


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", 16 << 30), ("800MB", 800_000_000), ("1.5 KiB", 1536), (7, 7), ("9", 9)],
)
def test_memory_is_read_with_its_unit(text, size):
    assert make_plan("dp=2", memory=text).memory == size


def test_memory_that_is_no_size():
    with pytest.raises(PlanError, match="memory='much' is no size"):
        make_plan("dp=2", memory="much")


NAN = float("nan")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"seed": -1}, "seed=-1\n  fix  use a whole number from 0"),
        ({"seed": NAN}, "seed=nan"),
        ({"seed": 1 << 70}, "seed=1180591620717411303424"),
        ({"timeout": 5}, "timeout=5\n  fix  give a timedelta"),
        ({"timeout": timedelta(seconds=-1)}, "timeout="),
        ({"timeout": timedelta(days=1000)}, "timeout="),
        ({"plan": 5}, "plan=5"),
        ({"program": 5}, "program=5"),
        ({"loss_fn": 5}, "loss_fn=5"),
        ({"microbatches": NAN}, "microbatches=nan"),
        ({"microbatches": "4"}, "microbatches='4'"),
        ({"microbatches": 10**20}, "microbatches=100000000000000000000"),
        ({"zero": True}, "zero=True"),
        ({"memory": NAN}, "memory=nan"),
        ({"memory": "1e400"}, "memory='1e400' is no size"),
        ({"offload": "yes"}, "offload='yes'"),
        ({"sequence_parallel": 0}, "sequence_parallel=0"),
        ({"hints": ["a"]}, r"hints=\['a'\]"),
        ({"hints": {"a": 5}}, "hints={'a': 5}"),
        ({"precision": []}, r"precision=\[\]"),
        ({"context_parallel": []}, r"context_parallel=\[\]"),
    ],
)
def test_what_compile_does_not_take(given, says):
    with pytest.raises(PlanError, match=says) as error:
        autopar.compile(plain_gpt().model, "", **given)
    assert error.value.fix


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("norm", [NAN, -1.0, "1", None])
def test_gradients_are_clipped_to_a_norm(norm):
    case = plain_gpt(layers=1)
    step = autopar.compile(case.model, "")
    step(**case.batch)
    with pytest.raises(AutoparError, match="cannot be clipped to a norm of"):
        step.clip_grad_norm_(norm)
    assert all(p.grad.isfinite().all() for p in step.parameters())
