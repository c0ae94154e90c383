"""The named schedules: their sizes, their idle time, and what is published of both."""

from __future__ import annotations

import pytest
from schedules import STAGES_PER_RANK, named

from passes.check_schedule import check
from passes.make_schedule import SCHEDULES, make_schedule
from passes.schedule import Schedule, ScheduleError, add_communication
from passes.simulate_schedule import Timeline, bubble_formula, grid, simulate


def timed(schedule: Schedule, f: float, i: float, w: float, hop: float = 0) -> Timeline:
    """A rank's forward, input and weight half take f, i and w, shared by its stages."""
    stages = schedule.stages
    share = len(schedule.ranks) / stages
    times = ([t * share] * stages for t in (f, i + w, w))
    return simulate(schedule, *times, send=hop)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ScheduleError, match=r"named 'pipe'\n  fix  one of gpipe, 1f1b"):
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


# --- published rates ---------------------------------------------------------------

# Qi 2023, arXiv:2401.10241, tables 5 and 6, on 8 ranks: microbatches, milliseconds of
# F, I, W and of a hop; idle share of 1F1B and of interleaved 1F1B.
PUBLISHED = {
    "1.5B": (3, [
        (24, (18.522, 18.086, 9.337, 0.601), 0.2431, 0.1055),
        (64, (18.546, 18.097, 9.321, 0.762), 0.1240, 0.0443),
    ]),
    "6.2B": (4, [
        (24, (29.718, 29.444, 19.927, 0.527), 0.2347, 0.0808),
        (32, (29.802, 29.428, 19.530, 0.577), 0.1898, 0.0628),
    ]),
}  # fmt: skip
ROWS = [(stages, *row) for stages, rows in PUBLISHED.values() for row in rows]


@pytest.mark.parametrize(("stages", "microbatches", "times", "plain", "looped"), ROWS)
def test_idle_shares_are_the_published_ones(stages, microbatches, times, plain, looped):
    timeline = timed(make_schedule("1f1b", 8, microbatches), *times)
    assert timeline.bubble == pytest.approx(plain, abs=1e-4)
    schedule = make_schedule("interleaved", 8, microbatches, stages)
    assert timed(schedule, *times).bubble == pytest.approx(looped, abs=4e-3)
