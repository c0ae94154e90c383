"""The checker accepts what can run, and names the fault of what cannot."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from schedules import HALVES, LOOPED, SIZES, VEE, all_schedules, by_name, lowered

from autopar.passes.schedule.check_schedule import check
from autopar.passes.schedule.make_schedule import make_schedule
from autopar.passes.schedule.schedule import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    add_communication,
)


def change(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(actions)
    return replace(schedule, ranks=tuple(ranks))


def swap(schedule: Schedule, first: str, second: str) -> Schedule:
    """Exchange two actions of one rank."""
    a, b = Action.parse(first), Action.parse(second)
    rank = next(r for r, actions in enumerate(schedule.ranks) if a in actions)
    actions = list(schedule.ranks[rank])
    i, j = actions.index(a), actions.index(b)
    actions[i], actions[j] = b, a
    return change(schedule, rank, actions)


def drop(schedule: Schedule, text: str) -> Schedule:
    action = Action.parse(text)
    ranks = tuple(tuple(a for a in acts if a != action) for acts in schedule.ranks)
    assert ranks != schedule.ranks, f"{text} is not in the schedule"
    return replace(schedule, ranks=ranks)


def first(text: str, actions: tuple[Action, ...]) -> list[Action]:
    """Bring one action before all others."""
    return sorted(actions, key=lambda action: str(action) != text)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_in_flight_is_all_for_gpipe_and_what_is_ahead_for_1f1b(ranks, microbatches):
    report = check(add_communication(make_schedule("gpipe", ranks, microbatches)))
    assert report.in_flight == (microbatches,) * ranks
    report = check(add_communication(make_schedule("1f1b", ranks, microbatches)))
    assert report.in_flight == tuple(min(microbatches, ranks - r) for r in range(ranks))


@pytest.mark.parametrize("schedule", all_schedules(), ids=by_name)
def test_a_good_schedule_has_an_order_in_which_each_message_was_sent(schedule):
    schedule = add_communication(schedule)
    done = set()
    for rank, action in check(schedule).order:
        assert not action.kind.is_recv or action.partner in done
        assert action in schedule.ranks[rank]
        done.add(action)
    assert len(done) == sum(map(len, schedule.ranks))


FAULTS = {
    "missing forward": (
        lambda s: drop(s, "1F2"),
        r"rank 1: 1F2 is missing",
    ),
    "missing backward": (
        lambda s: drop(s, "2B3"),
        r"rank 2: 2B3 is missing",
    ),
    "duplicate": (
        lambda s: change(s, 1, [*s.ranks[1], Action(1, Kind.B, 0)]),
        r"rank 1: 1B0 \(action 24\) is a duplicate of action \d+ of rank 1",
    ),
    "wrong rank": (
        lambda s: change(drop(s, "1B3"), 2, [*s.ranks[2], Action(1, Kind.B, 3)]),
        r"rank 2: 1B3 \(action 16\) is on the wrong rank: stage 1 lives on rank 1",
    ),
    "no such stage": (
        lambda s: change(s, 0, [*s.ranks[0], Action(3, Kind.F, 0)]),
        r"rank 0: 3F0 \(action 16\) is of no stage: there are 3",
    ),
    "no such microbatch": (
        lambda s: change(s, 0, [*s.ranks[0], Action(0, Kind.F, 4)]),
        r"rank 0: 0F4 \(action 16\) is of no microbatch: there are 4",
    ),
    "message to nobody": (
        lambda s: change(s, 2, [*s.ranks[2], Action(2, Kind.SEND_F, 0)]),
        r"rank 2: 2SEND_F0 \(action 16\) has no other end",
    ),
    "backward before forward": (
        lambda s: swap(s, "2F1", "2B1"),
        r"rank 2: 2B1 \(action 5\) waits for 2F1, which comes later",
    ),
    "early input": (
        lambda s: swap(s, "1RECV_F0", "1F0"),
        r"rank 1: 1F0 \(action 0\) waits for 1RECV_F0, which comes later \(action 1\)",
    ),
    "early gradient": (
        lambda s: swap(s, "0RECV_B1", "0B1"),
        r"rank 0: 0B1 \(action \d+\) waits for 0RECV_B1, which comes later",
    ),
    "sent before it is made": (
        lambda s: swap(s, "0F0", "0SEND_F0"),
        r"rank 0: 0SEND_F0 \(action 0\) waits for 0F0, which comes later",
    ),
    "message lacks both ends": (
        lambda s: drop(drop(s, "0SEND_F1"), "1RECV_F1"),
        r"rank 1: 1F1 \(action 3\) waits for 1RECV_F1, which is not there",
    ),
    "receive without send": (
        lambda s: drop(s, "0SEND_F2"),
        r"rank 1: 1RECV_F2 \(action \d+\) waits for 0SEND_F2, which rank 0 never does",
    ),
    "send without receive": (
        lambda s: drop(s, "0RECV_B3"),
        r"rank 0: 0B3 \(action 14\) waits for 0RECV_B3, which is not there",
    ),
    "messages out of order": (
        lambda s: change(s, 1, first("1RECV_F1", s.ranks[1])),
        r"rank 1: 1RECV_F1 \(action 0\) waits for 0SEND_F1, but rank 0 does 0SEND_F0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checker_names_each_fault_and_marks_its_rank(fault):
    spoil, message = FAULTS[fault]
    good = add_communication(make_schedule("1f1b", 3, 4))
    with pytest.raises(ScheduleError, match=message) as caught:
        check(spoil(good))
    marked = [line for line in str(caught.value).split("\n") if "<-- ERROR" in line]
    assert len(marked) == 1
    rank = str(caught.value).partition(", ")[2].partition(":")[0]
    assert marked[0].startswith(f"  {rank} |")


def test_weight_half_before_input_half_is_refused():
    with pytest.raises(ScheduleError, match=r"0W0 \(action \d\) waits for 0I0, which"):
        check(swap(lowered(HALVES), "0I0", "0W0"))


@pytest.mark.parametrize("half", ["0I1", "0W1"])
def test_both_halves_are_needed(half):
    with pytest.raises(ScheduleError, match=f"rank 0: {half} is missing"):
        check(lowered(HALVES.replace(f" {half}", "")))


def test_a_full_backward_beside_its_halves_is_refused():
    with pytest.raises(
        ScheduleError, match=r"0B0 \(action \d+\) is there beside its h"
    ):
        check(lowered(HALVES.replace("0W0", "0W0 0B0")))


def test_a_schedule_without_messages_is_told_how_to_get_them():
    with pytest.raises(ScheduleError) as caught:
        check(make_schedule("1f1b", 2, 3))
    assert str(caught.value) == (
        "schedule 1f1b, rank 0: 0B0 (action 2) waits for 0RECV_B0, which is not there\n"
        "  rank 0 | F0 F1 0B0  <-- ERROR HERE\n"
        "  rank 1 | F0 B0 F1 B1 F2 B2\n"
        "  fix  it has no messages yet: check(add_communication(schedule))"
    )


def test_a_deadlock_shows_where_each_rank_stops_and_marks_one_of_the_circle():
    # Rank 0 only waits for the circle of ranks 1 and 2.
    text = """\
schedule mine: 2 microbatches, stages on ranks 0 1 2
rank 0 | 0F0 0F1 0B0 0B1
rank 1 | 1F0 1B0 1F1 1B1
rank 2 | 2F0 2F1 2B0 2B1"""
    with pytest.raises(ScheduleError) as caught:
        check(lowered(text))
    assert str(caught.value) == (
        "schedule mine, rank 1: 1RECV_B0 (action 3) waits for 2SEND_B0 in a deadlock: "
        "the ranks wait in a circle\n"
        "  rank 0 | F0 F1 0RECV_B0\n"
        "  rank 1 | F0 1RECV_B0  <-- ERROR HERE\n"
        "  rank 2 | F0 2RECV_F1\n"
        "  rank 0 waits at 0RECV_B0 (action 4) for 1SEND_B0 (action 5 of rank 1)\n"
        "  rank 1 waits at 1RECV_B0 (action 3) for 2SEND_B0 (action 5 of rank 2)\n"
        "  rank 2 waits at 2RECV_F1 (action 2) for 1SEND_F1 (action 8 of rank 1)"
    )


def test_the_drawing_of_an_error_stays_narrow():
    schedule = add_communication(make_schedule("gpipe", 2, 99))
    with pytest.raises(ScheduleError) as caught:
        check(drop(schedule, "1B98"))
    lines = str(caught.value).split("\n")
    assert max(map(len, lines)) <= 88
    assert lines[2].startswith("  rank 1 | F0 F1 ")
    assert " … " in lines[2] and lines[2].endswith(" B97  <-- ERROR HERE")


@pytest.mark.parametrize("schedule", all_schedules(), ids=by_name)
def test_no_action_can_be_left_out_or_doubled(schedule):
    schedule = add_communication(schedule)
    check(schedule)
    for rank, actions in enumerate(schedule.ranks):
        for i, action in enumerate(actions):
            with pytest.raises(ScheduleError):
                check(drop(schedule, str(action)))
            with pytest.raises(ScheduleError, match="is a duplicate of"):
                check(change(schedule, rank, [*actions[:i], action, *actions[i:]]))


def runs(schedule: Schedule) -> bool:
    """Whether lists of F and B come to their end, messages left to themselves."""
    left = [list(actions) for actions in schedule.ranks]
    done: set[Action] = set()
    while True:
        before = len(done)
        for actions in left:
            while actions and can_run(actions[0], schedule.stages, done):
                done.add(actions.pop(0))
        if len(done) == before:
            return not any(left)


def can_run(action: Action, stages: int, done: set[Action]) -> bool:
    stage, kind, i = action.stage, action.kind, action.microbatch
    if kind is Kind.F:
        return stage == 0 or Action(stage - 1, kind, i) in done
    above = stage + 1 == stages or Action(stage + 1, kind, i) in done
    return above and Action(stage, Kind.F, i) in done


@pytest.mark.parametrize("text", [LOOPED, VEE, str(make_schedule("1f1b", 3, 4))])
def test_shuffled_lists_pass_just_when_they_can_run(text):
    random = Random(0)
    verdicts = []
    for _ in range(300):
        schedule = Schedule.parse(text)
        for _ in range(random.randint(1, 4)):
            rank = random.randrange(len(schedule.ranks))
            actions = list(schedule.ranks[rank])
            i = random.randrange(len(actions) - 1)
            actions[i], actions[i + 1] = actions[i + 1], actions[i]
            schedule = change(schedule, rank, actions)
        verdicts.append(runs(schedule))
        if verdicts[-1]:
            check(add_communication(schedule))
        else:
            with pytest.raises(ScheduleError, match=r"comes later|deadlock"):
                check(add_communication(schedule))
    assert 30 < sum(verdicts) < 270
