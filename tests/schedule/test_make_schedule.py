"""The named schedules: their sizes, their idle time, and what is published of both."""

from __future__ import annotations

import itertools

import pytest
from schedules import STAGES_PER_RANK, bubble_formula, named

from autopar.passes.cost import Seconds
from autopar.passes.schedule.check_schedule import check
from autopar.passes.schedule.make_schedule import SCHEDULES, make_schedule
from autopar.passes.schedule.schedule import Schedule, ScheduleError, add_communication
from autopar.passes.schedule.simulate_schedule import (
    Timeline,
    grid,
    simulate,
)


def timed(schedule: Schedule, f: float, i: float, w: float, hop: float = 0) -> Timeline:
    """A rank's forward, input and weight half take f, i and w, shared by its stages."""
    stages = schedule.stages
    share = len(schedule.ranks) / stages
    return simulate(schedule, [Seconds(f, i, w) * share] * stages, hop)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ScheduleError, match=r"named 'pipe'\n  fix  one of naive, gpipe, 1f1b"
    ):
        make_schedule("pipe", 2, 2)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 4), "ranks >= 1, got 0"),
        ((2, 0), "microbatches >= 1, got 0"),
        ((2, 4, 0), "stages_per_rank >= 1, got 0"),
    ],
)
def test_impossible_sizes_are_refused(name, sizes, message):
    with pytest.raises(ScheduleError, match=message):
        make_schedule(name, *sizes)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_wrong_number_of_stages_a_rank_is_refused_with_one_that_fits(name):
    right = STAGES_PER_RANK.get(name, 1)
    with pytest.raises(ScheduleError, match=rf"a rank, not {3 - right}\n") as caught:
        make_schedule(name, 2, 4, 3 - right)
    assert str(caught.value).endswith(f"fix  stages_per_rank={right}")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", range(1, 6))
def test_every_size_can_run(name, ranks):
    for microbatches in range(1, 14):
        check(add_communication(named(name, ranks, microbatches)))


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs"])
@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
def test_any_number_of_stages_a_rank_can_run(name, stages_per_rank):
    for ranks in range(1, 6):
        for microbatches in range(1, 14):
            schedule = make_schedule(name, ranks, microbatches, stages_per_rank)
            check(add_communication(schedule))


# --- several stages a rank ---------------------------------------------------------


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stages_per_rank", [2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_the_bubble_is_as_many_times_smaller_as_a_rank_has_stages(
    name, ranks, stages_per_rank, rounds
):
    microbatches = ranks * rounds
    schedule = make_schedule(name, ranks, microbatches, stages_per_rank)
    timeline = timed(schedule, 1, 1, 1)
    idle = 3 * (ranks - 1) / stages_per_rank
    assert timeline.idle == pytest.approx([idle] * ranks)
    formula = bubble_formula(ranks, microbatches, stages_per_rank)
    assert timeline.bubble == pytest.approx(formula)


@pytest.mark.parametrize("microbatches", [5, 6, 7, 9, 11])
def test_microbatches_that_ranks_do_not_divide_idle_no_more(microbatches):
    timeline = timed(make_schedule("interleaved", 4, microbatches, 2), 1, 1, 1)
    assert timeline.idle == pytest.approx([3 * 3 / 2] * 4)


def test_interleaving_keeps_less_than_breadth_first():
    interleaved = check(add_communication(make_schedule("interleaved", 4, 16, 2)))
    breadth_first = check(add_communication(make_schedule("looped-bfs", 4, 16, 2)))
    assert interleaved.in_flight == (11, 9, 7, 5)
    assert breadth_first.in_flight == (32, 32, 32, 32)


def test_grid_of_interleaved():
    assert (
        grid(make_schedule("interleaved", 2, 2, 2))
        == """\
rank 0 | 0F0 0F1 2F0 2F1 .   .   2B0 --  .   2B1 --  0B0 --  0B1 --
rank 1 | .   1F0 1F1 3F0 3B0 --  3F1 3B1 --  1B0 --  1B1 --  .   ."""
    )


def test_grid_of_looped_bfs():
    assert (
        grid(make_schedule("looped-bfs", 2, 2, 2))
        == """\
rank 0 | 0F0 0F1 2F0 2F1 .   .   .   2B0 --  2B1 --  0B0 --  0B1 --
rank 1 | .   1F0 1F1 3F0 3F1 3B0 --  3B1 --  1B0 --  1B1 --  .   ."""
    )


# --- one rank at a time ------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (4, 5), (5, 2)])
@pytest.mark.parametrize("times", [(1, 1, 1), (1.3, 0.7, 2.1)])
def test_naively_all_ranks_but_one_are_idle(ranks, microbatches, times):
    timeline = timed(named("naive", ranks, microbatches), *times, hop=0.5)
    assert timeline.in_flight == (1,) * ranks
    spans = sorted((s.start, s.end) for own in timeline.compute for s in own)
    assert all(now[1] <= then[0] + 1e-9 for now, then in itertools.pairwise(spans))
    exact = timed(named("naive", ranks, microbatches), *times)
    assert exact.bubble == pytest.approx((ranks - 1) / ranks)
    assert exact.total == pytest.approx(microbatches * ranks * sum(times))


def test_with_one_microbatch_every_schedule_is_naive():
    totals = {
        name: timed(named(name, 3, 1), 1, 1, 1).total
        for name in ("naive", "gpipe", "1f1b")
    }
    assert set(totals.values()) == {totals["naive"]}


def test_grid_of_naive():
    assert (
        grid(named("naive", 2, 2))
        == """\
rank 0 | F0 .  .  .  B0 -- F1 .  .  .  B1 --
rank 1 | .  F0 B0 -- .  .  .  F1 B1 -- .  ."""
    )


# --- backwards in halves -----------------------------------------------------------


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 8), (4, 12), (8, 24)])
@pytest.mark.parametrize("times", [(1, 1, 1), (1.2, 1.1, 0.9), (1, 1, 0.5)])
def test_idle_time_is_that_of_the_published_formulas(ranks, microbatches, times):
    """Qi 2023, table 2: what is idle between a rank's first action and its last."""
    f, i, w = times
    for name, saved in (("1f1b", -w), ("zb-h1", w), ("zb-h2", 2 * w)):
        timeline = timed(named(name, ranks, microbatches), *times)
        idle = max(timeline.elapsed) - microbatches * (f + i + w)
        assert idle == pytest.approx((ranks - 1) * (f + i - saved), abs=1e-9), name


def test_h1_has_a_third_of_the_bubble_at_the_same_peak():
    plain, h1 = (timed(named(name, 4, 12), 1, 1, 1) for name in ("1f1b", "zb-h1"))
    assert h1.idle == pytest.approx([idle / 3 for idle in plain.idle])
    assert max(h1.in_flight) == max(plain.in_flight) == 4


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 8), (4, 12), (8, 24)])
def test_in_flight_on_all_ranks_alike(ranks, microbatches):
    def in_flight(name: str) -> tuple[int, ...]:
        return check(add_communication(named(name, ranks, microbatches))).in_flight

    assert in_flight("zb-h1") == (ranks,) * ranks
    assert in_flight("zb-h2") == (2 * ranks - 1,) * ranks
    assert in_flight("zb-v") == (2 * ranks,) * ranks  # stages half as large


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (4, 8), (5, 17)])
def test_without_a_bubble_ranks_end_as_they_began(name, ranks, microbatches):
    timeline = timed(named(name, ranks, microbatches), 1, 1, 1)
    assert timeline.elapsed == pytest.approx(timeline.busy)


def test_grid_of_zb_h1():
    assert (
        grid(named("zb-h1", 3, 4))
        == """\
rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"""
    )


def test_grid_of_zb_v():
    assert (
        grid(named("zb-v", 2, 3))
        == """\
rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"""
    )


# --- published rates ---------------------------------------------------------------

# Qi 2023, arXiv:2401.10241, tables 5 and 6, on 8 ranks: stages a rank if interleaved,
# microbatches, milliseconds of F, I, W and of a hop; idle share of each schedule.
COLUMNS = {"1f1b": 1e-4, "interleaved": 4e-3, "zb-h1": 1e-4, "zb-h2": 1e-4}
PUBLISHED = [
    (3, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1055, 0.1585, 0.1083)),
    (3, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0443, 0.0674, 0.0444)),
    (4, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.0808, 0.1323, 0.0698)),
    (4, 32, (29.802, 29.428, 19.530, 0.577), (0.1898, 0.0628, 0.1045, 0.0559)),
]


@pytest.mark.parametrize(("stages", "microbatches", "times", "rates"), PUBLISHED)
def test_idle_shares_are_the_published_ones(stages, microbatches, times, rates):
    """To the last printed digit, but interleaved, which has uneven stages there."""
    for (name, tolerance), rate in zip(COLUMNS.items(), rates, strict=True):
        several = stages if name == "interleaved" else 1
        timeline = timed(make_schedule(name, 8, microbatches, several), *times)
        idle = 1 - microbatches * sum(times[:3]) / max(timeline.elapsed)
        assert idle == pytest.approx(rate, abs=tolerance), name
