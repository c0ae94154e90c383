"""Cuts that a compiler finds: even ranks, and parameters that are gathered."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest
from cases import Case
from models import plain_gpt

from autopar.options import make_plan
from autopar.passes.pipeline import compile_program
from autopar.passes.price.cluster import PLAIN, Cluster
from autopar.passes.program import Program, StageSpec
from autopar.passes.schedule.make_schedule import place_stages
from autopar.passes.stage.even_ranks import even_ranks

SLOW = 1e6  # bytes a second between ranks: what moves takes most of the time


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_ranks_get_nearly_as_even_as_cuts_can_make_them(name: str) -> None:
    draw, gains = random.Random(1), []
    placement = place_stages(name, 2, 2)
    for _ in range(40):
        places = draw.randint(6, 9)
        pieces = [draw.choice([1.0, 1.0, 1.0, 2.5]) for _ in range(places)]
        spent = [0.0, *itertools.accumulate(pieces)]

        def cost(i: int, j: int, spent: list[float] = spent) -> float:
            return spent[j] - spent[i]

        def slowest(ends, cost=cost) -> float:
            ranks = [0.0, 0.0]
            for rank, a, b in zip(placement, (0, *ends), ends, strict=False):
                ranks[rank] += cost(a, b)
            return max(ranks)

        start = [1, 2, 3, places]
        found = even_ranks(start, placement, cost)
        assert found[-1] == places and sorted(set(found)) == found and found[0] > 0
        every = itertools.combinations(range(1, places), 3)
        best = min(slowest((*ends, places)) for ends in every)
        gains.append(slowest(found) / best)
        assert slowest(found) <= slowest(start)
    assert max(gains) < 1.15 and sum(gain < 1.001 for gain in gains) > 30


@cache
def case() -> Case:
    return plain_gpt(layers=4, batch=16, vocab=1024, tied=False)


def links_of(speed: float) -> Cluster:
    """Bytes a second."""
    (level,) = PLAIN.levels
    return replace(PLAIN, levels=(replace(level, bytes_per_second=speed),))


@cache
def shared(zero: int) -> Program:
    plan = make_plan("pp=2,dp=2", microbatches=2, zero=zero)
    return compile_program(case().trace(None), plan, links_of(SLOW))


@cache
def deep() -> Case:
    """The head is as much as some layers."""
    return plain_gpt(layers=9, batch=16, vocab=300, tied=False)


def compile_again(schedule: str, microbatches: int) -> Program:
    wishes = {"microbatches": microbatches, "schedule": schedule}
    plan = make_plan("pp=2", **wishes, stages_per_rank=2)
    return compile_program(deep().trace(None), plan, links_of(1e12))


def busy(program: Program) -> list[float]:
    ranks = [0.0] * program.mesh.axis_size("pp")
    for rank, stage in zip(program.schedule.stage_to_rank, program.stages, strict=True):
        ranks[rank] += stage.took.total
    return ranks


def uneven(program: Program) -> float:
    return max(busy(program)) / sum(busy(program))


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("microbatches", [2, 8])
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_with_many_microbatches_ranks_are_balanced(
    schedule: str, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages that are balanced one by one leave the rank with the head too long."""
    found = compile_again(schedule, microbatches)
    as_they_are = lambda ends, placement, cost: list(ends)  # noqa: E731
    monkeypatch.setattr("autopar.passes.stage.chain.even_ranks", as_they_are)
    by_stage = compile_again(schedule, microbatches)
    if microbatches == 2:
        assert found.plan.cuts == by_stage.plan.cuts
    else:
        gain = 1.0 if schedule == "zb-v" else 0.9  # whose ends share a rank anyway
        assert uneven(found) <= gain * uneven(by_stage)


def moved(stage: StageSpec) -> list[float]:
    """Bytes that a stage waits for forward, and in its backward."""
    parts = ("forward", "backward")
    return [
        sum(w.bytes for w in stage.took.exposed if w.part == part) for part in parts
    ]


@pytest.mark.slow
def test_gathers_of_parameters_are_priced_when_they_run() -> None:
    """By zero 3: forward once, backward once and scattered once; 2: scattered."""
    model = case().model
    size = sum(p.numel() for p in model.parameters()) * 4
    # No backward reads tables that are looked up in, or biases.
    tables = (model.tokens.weight, model.positions.weight)
    unread = sum(table.numel() for table in tables) * 4
    loss = 100  # bytes that the loss's own sums move
    for zero, times in ((1, (0, 0)), (2, (0, 1)), (3, (1, 2))):
        found = [moved(s) for s in shared(zero).stages]
        for part, n in enumerate(times):
            loss += 0.01 * size * (n == 2)
            wanted = n * size - (unread if n == 2 else 0)
            assert sum(x[part] for x in found) == pytest.approx(wanted, abs=loss)


def test_cuts_balance_what_is_gathered_too() -> None:
    """With slow links each stage gets half of the parameters, if it may hold shares."""
    assert shared(1).plan.cuts != shared(3).plan.cuts
    first, last = (sum(moved(s)) for s in shared(3).stages)
    assert first / last == pytest.approx(1.0, rel=0.2)
