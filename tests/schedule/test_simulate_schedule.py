"""Simulated time of schedules, and how they are drawn."""

from __future__ import annotations

from itertools import pairwise

import pytest
from schedules import HALVES, SIZES, VEE, all_schedules, bubble_formula, by_name

from autopar.passes.cost import Seconds
from autopar.passes.schedule.make_schedule import make_schedule
from autopar.passes.schedule.schedule import Kind, Schedule, add_communication
from autopar.passes.schedule.simulate_schedule import (
    Timeline,
    grid,
    simulate,
)

STAGE = Seconds(1.0, 1.0, 1.0)


def equal_stages(schedule: Schedule, send: float = 0.0) -> Timeline:
    return simulate(schedule, [STAGE] * schedule.stages, send)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_equal_stages_idle_by_the_published_formula(name, ranks, microbatches):
    timeline = equal_stages(make_schedule(name, ranks, microbatches))
    assert timeline.bubble == bubble_formula(ranks, microbatches)
    assert timeline.total == 3 * (microbatches + ranks - 1)
    assert timeline.busy == (3 * microbatches,) * ranks
    assert timeline.idle == (3 * (ranks - 1),) * ranks


def test_the_formula_is_the_share_of_all_time():
    assert bubble_formula(4, 8) == 3 / 11
    assert bubble_formula(1, 5) == 0


@pytest.mark.parametrize("schedule", all_schedules(), ids=by_name)
def test_simulated_time_respects_lists_and_messages(schedule):
    hop = 0.25
    timeline = equal_stages(schedule, send=hop)
    spans = {s.action: s for spans in timeline.spans for s in spans}
    for actions, row in zip(timeline.schedule.ranks, timeline.spans, strict=True):
        assert tuple(span.action for span in row) == actions
        for before, after in pairwise(row):
            assert after.start == before.end
    for action, span in spans.items():
        if action.kind.is_recv:
            arrival = spans[action.partner].end + hop
            assert span.end == max(span.start, arrival)
        elif action.kind.is_send:
            assert span.seconds == 0


def test_a_lowered_schedule_takes_the_same_time():
    schedule = make_schedule("1f1b", 3, 5)
    assert equal_stages(add_communication(schedule)) == equal_stages(schedule)


def test_the_slowest_stage_sets_the_pace():
    # By hand: fill 1 + 3, then 4 microbatches of 9 on stage 1, drain 2.
    timeline = simulate(make_schedule("gpipe", 2, 4), [STAGE, STAGE * 3])
    assert timeline.total == 1 + 4 * 9 + 2
    assert timeline.busy == (12, 36)
    assert timeline.idle == (27, 3)
    assert timeline.bubble == 30 / (2 * 39)


def test_hops_delay_the_one_microbatch_there_and_back():
    timeline = equal_stages(make_schedule("1f1b", 4, 1), send=0.5)
    assert timeline.total == 4 * 3 + 2 * 3 * 0.5


def test_weight_gradients_in_the_gaps_save_time():
    whole = equal_stages(make_schedule("1f1b", 2, 3))
    halves = equal_stages(Schedule.parse(HALVES))
    assert (whole.total, halves.total) == (12, 10)
    assert halves.busy == whole.busy
    assert whole.in_flight == (2, 1)
    assert halves.in_flight == (3, 3)


def test_the_weight_half_takes_its_given_part_of_the_backward():
    timeline = simulate(Schedule.parse(HALVES), [Seconds(1, 2, 1)] * 2)
    seconds = {s.action.kind: s.seconds for s in timeline.compute[0]}
    assert seconds == {Kind.F: 1, Kind.I: 2, Kind.W: 1, Kind.B: 3}


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"stages": [STAGE]}, "there are seconds for 1 stages, but .* '1f1b' has 2"),
        ({"stages": [STAGE, Seconds(1, -1, 1)]}, "must be finite .*input_half=-1"),
        ({"stages": [Seconds(float("nan"), 1, 1), STAGE]}, "finite .*forward=nan"),
        ({"stages": [STAGE, Seconds(1, 1, -1)]}, "must be finite .*weight_half=-1"),
        ({"send": -1}, "send must be finite seconds >= 0, got -1"),
        ({"stages": [Seconds()] * 2}, "nothing to time"),
    ],
)
def test_impossible_costs_are_refused(costs, message):
    costs = {"stages": [STAGE, STAGE], **costs}
    with pytest.raises(ValueError, match=message):
        simulate(make_schedule("1f1b", 2, 2), **costs)


def test_grid_of_gpipe():
    assert (
        grid(make_schedule("gpipe", 2, 3))
        == """\
rank 0 | F0 F1 F2 .  .  .  B0 -- B1 -- B2 --
rank 1 | .  F0 F1 F2 B0 -- B1 -- B2 -- .  ."""
    )


def test_grid_of_1f1b():
    assert (
        grid(make_schedule("1f1b", 4, 4))
        == """\
rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 -- .  B1 -- .  B2 -- .  B3 --
rank 1 | .  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 -- .  .
rank 2 | .  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .  .  .
rank 3 | .  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .  .  ."""
    )


def test_grid_with_fewer_microbatches_than_ranks():
    assert (
        grid(make_schedule("1f1b", 3, 1))
        == """\
rank 0 | F0 .  .  .  .  .  .  B0 --
rank 1 | .  F0 .  .  .  B0 -- .  .
rank 2 | .  .  F0 B0 -- .  .  .  ."""
    )


def test_grid_names_the_stage_where_a_rank_has_several():
    assert (
        grid(Schedule.parse(VEE))
        == """\
rank 0 | 0F0 0F1 .   3F0 3B0 --  3F1 3B1 --  .   0B0 --  .   .   0B1 --
rank 1 | .   1F0 2F0 1F1 2F1 .   2B0 --  1B0 --  2B1 --  1B1 --  .   ."""
    )


def test_a_timeline_prints_its_grid_and_its_sums():
    assert (
        str(equal_stages(Schedule.parse(HALVES)))
        == """\
rank 0 | F0 F1 F2 I0 W0 I1 W1 B2 -- .
rank 1 | .  F0 I0 F1 I1 F2 I2 W0 W1 W2
total 10 s, bubble 10.0%, in flight 3 3"""
    )


def test_a_timeline_is_drawn_in_units_of_its_shortest_action():
    stages = Seconds(0.1, 0.1, 0.1), Seconds(0.3, 0.2, 0.2)
    timeline = simulate(make_schedule("gpipe", 2, 1), stages, send=0.1)
    assert (
        grid(timeline)
        == """\
rank 0 | F0 .  .  .  .  .  .  .  .  .  B0 --
rank 1 | .  .  F0 -- -- B0 -- -- -- .  .  ."""
    )


@pytest.mark.parametrize("schedule", all_schedules(), ids=by_name)
def test_every_compute_action_is_drawn_once(schedule):
    cells = grid(schedule, width=10_000).split()
    for action in (a for actions in schedule.ranks for a in actions):
        label = schedule.label(action)
        same = sum(label == schedule.label(a) for acts in schedule.ranks for a in acts)
        assert cells.count(label) == same


def test_a_wide_grid_leaves_out_its_middle():
    lines = grid(make_schedule("1f1b", 4, 32), width=60).splitlines()
    assert lines[0] == "rank 0 | F0  F1  F2  F3  .   .   …   .   B30 --  .   B31 --"
    assert max(map(len, lines)) <= 60
    assert len({line.index("…") for line in lines}) == 1
