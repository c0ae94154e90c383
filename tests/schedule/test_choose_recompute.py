"""Recomputation chosen under a memory budget: it fits, costs least, changes no bit."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from cases import run_all_ranks
from models import gpt2, llama, plain_gpt

from autopar.passes.plan import RECOMPUTE, Plan, PlanError
from autopar.passes.program import Program
from autopar.passes.schedule.memory import OutOfMemory
from autopar.passes.schedule.pareto_front import Option, pareto_front
from autopar.passes.schedule.schedule import ScheduleError


def most(program: Program) -> int:
    """Bytes of the fullest rank."""
    return max(memory.total for memory in program.memory)


def between(case, part: float, mesh: str, microbatches: int, **options) -> int:
    """A budget: 0 is what full recomputation needs, 1 what none needs."""
    none = most(case.compile(mesh, microbatches, **options))
    full = most(case.compile(mesh, microbatches, recompute="full", **options))
    assert full < none
    return int(full + part * (none - full))


THINGS = [
    [Option(0, 90), Option(1, 60), Option(3, 10)],
    [Option(0, 50), Option(0, 50), Option(2, 20)],
    [Option(0, 70), Option(1, 80), Option(1, 20)],
]


def test_trades_are_all_that_nothing_beats():
    found = list(pareto_front(THINGS))
    every = [
        (sum(o.seconds for o in picked), sum(o.bytes for o in picked))
        for picked in product(*THINGS)
    ]
    best = {
        one
        for one in every
        if not any(
            other != one and other[0] <= one[0] and other[1] <= one[1]
            for other in every
        )
    }
    assert {(trade.seconds, trade.bytes) for trade in found} == best
    for trade in found:
        options = [t[i] for t, i in zip(THINGS, trade.picked, strict=True)]
        assert sum(o.bytes for o in options) == trade.bytes
        assert trade.picked[1] != 1  # it gains nothing over the option before it


def test_of_equal_things_the_earlier_give_way_first():
    alike = [[Option(0, 10), Option(1, 1)]] * 3
    picked = [trade.picked for trade in pareto_front(alike)]
    assert picked == [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)]


@pytest.mark.matrix(quick=0, daily=4)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("pp=2,tp=2", {}),
        ("pp=2", {"schedule": "gpipe"}),
        ("pp=2", {"schedule": "interleaved", "stages_per_rank": 2}),
        ("dp=2", {"zero": 3}),
    ],
)
def test_what_is_chosen_fits_and_changes_no_bit(mesh, options, part):
    case = plain_gpt(layers=6, dropout=0.1)
    budget = between(case, part, mesh, 4, **options)
    none = case.compile(mesh, 4, **options)
    chosen = case.compile(mesh, 4, recompute="auto", memory=budget, **options)
    assert most(chosen) <= budget < most(none)
    assert set(chosen.plan.recompute_layers.values()) & {"selective", "full"}
    loss, grads = run_all_ranks(none, case.model, case.batch)
    loss_too, grads_too = run_all_ranks(chosen, case.model, case.batch)
    assert torch.equal(loss, loss_too)
    assert all(torch.equal(grads[name], grads_too[name]) for name in grads)


@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt2, llama])
def test_hugging_face_models_within_a_budget(build):
    case = build(padded=True).double()
    budget = between(case, 0.5, "pp=2,tp=2", 4)
    case.verify("pp=2,tp=2", 4, recompute="auto", memory=budget)


def extra(program: Program) -> float:
    return sum(stage.took.total for stage in program.stages)


@pytest.mark.slow
def test_no_other_choice_that_fits_takes_less_time():
    """All 3^3 choices for the layers of one rank, tried one by one."""
    case = plain_gpt(layers=3, dropout=0.1)
    budget = between(case, 0.4, "pp=1", 2)
    chosen = case.compile("pp=1", 2, recompute="auto", memory=budget)
    layers = list(chosen.plan.recompute_layers)
    times = []
    for policies in product(RECOMPUTE, repeat=3):
        fixed = dict(zip(layers, policies, strict=True))
        program = case.compile("pp=1", 2, recompute_layers=fixed)
        if most(program) <= budget:
            times.append(extra(program))
    assert 0 < len(times) < 3**3
    assert extra(chosen) == pytest.approx(min(times), rel=1e-9)


@pytest.mark.slow
def test_ranks_with_more_in_flight_compute_more_again():
    case = plain_gpt(layers=6)
    budget = between(case, 0.4, "pp=2", 8)
    program = case.compile("pp=2", 8, recompute="auto", memory=budget)
    counts = [
        sum(program.plan.policy(layer) == "full" for layer in stage.layers)
        for stage in program.stages
    ]
    assert counts[0] > counts[1]


def test_enough_memory_computes_nothing_again():
    case = plain_gpt()
    program = case.compile("pp=2", 2, recompute="auto", memory=1 << 40)
    assert set(program.plan.recompute_layers.values()) == {"none"}
    assert program.modules == case.compile("pp=2", 2).modules


def test_the_plan_holds_the_choice_and_compiles_to_the_same():
    case = plain_gpt()
    budget = between(case, 0.5, "pp=2", 4)
    program = case.compile("pp=2", 4, recompute="auto", memory=budget)
    read = Plan.from_json(program.plan.to_json())
    assert read == program.plan and read.recompute == "auto"
    again = case.compile(
        "pp=2",
        4,
        recompute="auto",
        memory=budget,
        recompute_layers=read.recompute_layers,
    )
    assert again.modules == program.modules


@pytest.mark.slow
def test_what_the_user_fixes_stays():
    case = plain_gpt(layers=6)
    budget = between(case, 0.75, "pp=2", 4)
    fixed = {"blocks.0": "none"}
    program = case.compile(
        "pp=2", 4, recompute="auto", memory=budget, recompute_layers=fixed
    )
    assert program.plan.recompute_layers["blocks.0"] == "none"
    assert program.plan.recompute_layers["blocks.1"] == "full"


@pytest.mark.slow
def test_both_schedule_and_recomputation_are_chosen():
    case = plain_gpt(layers=6, dropout=0.1).double()
    options = {"stages_per_rank": 2}
    zb_v = {"schedule": "zb-v", **options}
    budget = between(case, 0.3, "pp=2", 4, **zb_v)
    program = case.compile(
        "pp=2", 4, schedule="auto", recompute="auto", memory=budget, **options
    )
    assert most(program) <= budget
    case.verify("pp=2", 4, schedule="auto", recompute="auto", memory=budget, **options)


# --- what does not fit ---------------------------------------------------------------


def test_too_little_memory_says_how_much_is_missing_and_where():
    case = plain_gpt()
    need = most(case.compile("pp=2", 4, recompute="full"))
    with pytest.raises(OutOfMemory) as caught:
        case.compile("pp=2", 4, recompute="auto", memory=need - 1000)
    text = str(caught.value)
    assert "needs 1,000 bytes more" in text and "+" in text
    assert f"use memory={need}" in text
    case.compile("pp=2", 4, recompute="auto", memory=need)  # the fix is one


def test_a_plan_that_needs_more_than_its_memory_is_refused():
    case = plain_gpt()
    need = most(case.compile("pp=2", 4))
    case.compile("pp=2", 4, memory=need)
    with pytest.raises(OutOfMemory, match="most are"):
        case.compile("pp=2", 4, memory=need - 1)


def test_no_schedule_fits():
    with pytest.raises(ScheduleError, match="no schedule fits"):
        plain_gpt().compile("pp=2", 4, schedule="auto", memory=1000)


def test_auto_needs_a_budget():
    with pytest.raises(PlanError, match=r'fix +give memory="16GiB"'):
        plain_gpt().compile("pp=2", 4, recompute="auto")
