"""Schedules as data: text, names, and the lowering to messages."""

from __future__ import annotations

import pytest
from schedules import HALVES, LOOPED, VEE, all_schedules, by_name, lowered

from autopar.passes.schedule.make_schedule import make_schedule
from autopar.passes.schedule.schedule import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    add_communication,
)


@pytest.mark.parametrize("kind", Kind)
def test_an_action_prints_and_parses_back(kind):
    action = Action(12, kind, 305)
    assert str(action) == f"12{kind.value}305"
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 ", "-1F0", "2f0"])
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


@pytest.mark.parametrize("schedule", all_schedules(), ids=by_name)
def test_a_schedule_prints_and_parses_back(schedule):
    for form in (schedule, add_communication(schedule)):
        assert Schedule.parse(str(form)) == form


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedule x", "does not read as"),
        (LOOPED.replace("rank 1 |", "rank 2 |"), r"does not begin with 'rank 1 \|'"),
        (LOOPED.replace("3F1", "3G1"), "'3G1' is not an action"),
        (LOOPED.replace("0 1 0 1", "0 1 0 2"), "placed on rank 2"),
        (LOOPED.replace("2 micro", "0 micro"), "microbatches >= 1, got 0"),
    ],
)
def test_text_that_is_no_schedule_is_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.parse(text)


def test_messages_stand_beside_what_makes_and_needs_them():
    assert str(add_communication(make_schedule("1f1b", 2, 2))) == (
        "schedule 1f1b: 2 microbatches, stages on ranks 0 1\n"
        "rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "rank 1 | 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )


def test_a_pair_of_ranks_receives_in_the_order_sent():
    # 3F1's input arrives before 1B0's gradient, though 1B0 runs first.
    actions = str(lowered(LOOPED)).splitlines()[2]
    assert " 3SEND_B0 3RECV_F1 1RECV_B0 1B0 1SEND_B0 3F1 " in actions


def test_neighbours_on_one_rank_exchange_no_message():
    text = str(lowered(VEE))
    assert "1F0 1SEND" not in text
    assert "1RECV_B0" not in text
    assert "2RECV_F0" not in text
    assert "2SEND_F0" in text and "2SEND_B0" not in text


def test_the_input_half_exchanges_gradients_and_the_weight_half_does_not():
    _, rank0, rank1 = str(lowered(HALVES)).splitlines()
    assert " 0RECV_B0 0I0 0W0 0RECV_B1 0I1 0W1 0RECV_B2 0B2" in rank0
    assert rank1.endswith(" 1I2 1SEND_B2 1W0 1W1 1W2")


@pytest.mark.parametrize("schedule", all_schedules(), ids=by_name)
def test_lowering_twice_changes_nothing(schedule):
    once = add_communication(schedule)
    assert once.has_communication and not schedule.has_communication
    assert add_communication(once) == once
    for action in (a for actions in once.ranks for a in actions):
        if not action.kind.is_compute:
            assert action.partner.partner == action
            assert action.partner in once.ranks[once.peer(action)]
