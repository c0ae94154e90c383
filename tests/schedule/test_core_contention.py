"""Schedules on ranks that share cores, against closed forms and small time steps."""

from __future__ import annotations

import math
import random

import pytest

from autopar.machine.cluster_file import cluster_data, cluster_from
from autopar.passes.cost import Seconds
from autopar.passes.mesh import Mesh
from autopar.passes.price.cluster import ClusterError
from autopar.passes.schedule.core_contention import (
    ALONE,
    CoreContention,
    simulate_contention,
)
from autopar.passes.schedule.make_schedule import make_schedule
from autopar.passes.schedule.schedule import Kind, Schedule, add_communication
from autopar.passes.schedule.simulate_schedule import simulate

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))


def drawn(
    name: str, ranks: int, stages_per_rank: int, seed: int
) -> tuple[Schedule, list[Seconds]]:
    schedule = make_schedule(name, ranks, 2 * ranks, stages_per_rank)
    chance = random.Random(seed)
    forward = [chance.uniform(0.5, 2) for _ in range(schedule.stages)]
    backward = [chance.uniform(1, 4) for _ in range(schedule.stages)]
    weight = [b * chance.uniform(0.2, 0.7) for b in backward]
    parts = zip(forward, backward, weight, strict=True)
    return schedule, [Seconds(f, b - w, w) for f, b, w in parts]


@pytest.mark.parametrize(("name", "each"), SCHEDULES)
def test_with_a_core_for_each_and_each_message_nobody_waits(name, each):
    schedule, stages = drawn(name, 3, each, 0)
    alone = simulate(schedule, stages, 0.1)
    enough = 3 + len(alone.schedule.ranks) * schedule.microbatches * schedule.stages
    crowded = simulate_contention(schedule, stages, 0.1, CoreContention(enough, 1))
    for mine, theirs in zip(crowded.spans, alone.spans, strict=True):
        assert [s.action for s in mine] == [s.action for s in theirs]
        assert [s.end for s in mine] == pytest.approx([s.end for s in theirs])


@pytest.mark.parametrize(("name", "each"), SCHEDULES)
@pytest.mark.parametrize("processes", [1, 3])
def test_one_core_takes_as_long_as_all_the_work(name, each, processes):
    """Something can always run, so the core is never idle."""
    schedule, stages = drawn(name, 4, each, 1)
    sends = sum(
        action.kind.is_send
        for actions in add_communication(schedule).ranks
        for action in actions
    )
    work = schedule.microbatches * sum(s.total for s in stages) + 0.2 * sends
    run = simulate_contention(schedule, stages, 0.2, CoreContention(1, processes))
    assert run.total == pytest.approx(processes * work)


def test_ranks_slow_each_other_down_only_while_they_are_busy():
    """Two equal stages on one core and a half, two microbatches under GPipe, by hand:
    F0 alone; F1 and F0 at 3/4 each; F1 alone; and the same backwards."""
    schedule = make_schedule("gpipe", 2, 2)
    stages = [Seconds(3, 1.5, 1.5)] * 2
    run = simulate_contention(schedule, stages, 0.0, CoreContention(1.5))
    assert run.total == pytest.approx(2 * (3 + 3 / 0.75 + 3))
    first, second = run.compute
    assert [s.end for s in first][:2] == pytest.approx([3, 7])
    assert [s.end for s in second][:2] == pytest.approx([7, 10])


@pytest.mark.parametrize(("name", "each"), SCHEDULES)
@pytest.mark.parametrize(
    "contention",
    [CoreContention(2), CoreContention(3, 2), CoreContention(0.5)],
    ids=str,
)
def test_spans_are_those_of_small_steps_of_time(name, each, contention):
    schedule, stages = drawn(name, 3, each, 2)
    run = simulate_contention(schedule, stages, 0.3, contention)
    small = 1e-2
    assert run.total == pytest.approx(
        by_small_steps(add_communication(schedule), stages, 0.3, contention, small),
        rel=0.02,
    )
    lower = simulate(schedule, stages, 0.3).total
    assert run.total >= lower * (1 - 1e-9)


def test_a_cluster_says_who_shares_its_cores() -> None:
    data = {"devices": 4, "device": "CPU", "cores": 2}
    cluster = cluster_from(data)
    assert cluster_from(cluster_data(cluster)) == cluster
    assert cluster.contention(Mesh.parse("pp=2,tp=2")) == CoreContention(2, 2)
    assert cluster_from({**data, "cores": 0}).contention(Mesh.parse("pp=4")) == ALONE
    with pytest.raises(ClusterError, match=r"the cores of the cluster are -1"):
        cluster_from({**data, "cores": -1})


def by_small_steps(
    schedule: Schedule,
    stages: list[Seconds],
    send: float,
    contention: CoreContention,
    step: float,
) -> float:
    """The total, time going on by `step`: each job that runs gets its part of it."""
    took = {
        Kind.F: lambda s: stages[s].forward,
        Kind.B: lambda s: stages[s].backward,
        Kind.I: lambda s: stages[s].input_half,
        Kind.W: lambda s: stages[s].weight_half,
    }
    at = [0] * len(schedule.ranks)
    left: list[float | None] = [None] * len(schedule.ranks)
    messages: dict[object, float] = {}
    now = 0.0
    while any(i < len(a) for i, a in zip(at, schedule.ranks, strict=True)):
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions) and left[rank] is None:
                action = actions[at[rank]]
                if action.kind.is_compute:
                    left[rank] = took[action.kind](action.stage)
                    continue
                if action.kind.is_recv and messages.get(action, math.inf) > 0:
                    break
                if action.kind.is_send:
                    messages[action.partner] = send
                at[rank] += 1
        jobs = sum(x is not None for x in left) + sum(m > 0 for m in messages.values())
        speed = (
            min(1.0, contention.cores / (contention.processes * jobs)) if jobs else 1.0
        )
        now += step
        for rank, x in enumerate(left):
            if x is not None:
                left[rank] = x - step * speed
                if left[rank] <= 0:
                    left[rank], at[rank] = None, at[rank] + 1
        for key, x in messages.items():
            messages[key] = x - step * speed if x > 0 else x
    return now
