"""order: what ranks of a pipeline do, in turn, as lines of text that a plan can hold.

`0F0 0F1 0I0 0W0` is a rank's line: actions as `passes.schedule.schedule` writes them,
without messages, which follow from the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..schedule.check_schedule import check
from ..schedule.schedule import Action, Kind, Schedule, ScheduleError, add_communication

NAME = "made"
ANY = re.compile(r"(\d+)([FIW])(\d+)")
FIRST = re.compile(r"\b(\d+)F0\b")  # each stage's forward of the first microbatch


def write_order(schedule: Schedule) -> tuple[str, ...]:
    """A line for each rank."""
    return tuple(
        " ".join(str(a) for a in actions if a.kind.is_compute)
        for actions in schedule.ranks
    )


def place_order(lines: Sequence[str]) -> tuple[int, ...]:
    """The rank of each stage of an order that can be read."""
    placed = {
        int(stage): rank
        for rank, line in enumerate(lines)
        for stage in FIRST.findall(line)
    }
    return tuple(placed[stage] for stage in sorted(placed))


def expand_order(lines: Sequence[str], microbatches: int) -> Schedule:
    """The schedule of an order that can be read, with its messages."""
    actions = tuple(
        tuple(Action(int(s), Kind[kind], int(m)) for s, kind, m in ANY.findall(line))
        for line in lines
    )
    return add_communication(Schedule(NAME, microbatches, place_order(lines), actions))


def read_order(
    lines: Sequence[str], ranks: int, microbatches: int, stages_per_rank: int
) -> Schedule:
    """The schedule that lines stand for, with its messages.

    Raises ScheduleError: they are no schedule of such a pipeline, or cannot run.
    """
    if len(lines) != ranks:
        raise ScheduleError(
            f"the order has {len(lines)} lines for {ranks} pipeline ranks",
            fix='write one for each, or "order": [] to have it made',
        )
    actions = [tuple(map(Action.parse, line.split())) for line in lines]
    stages = ranks * stages_per_rank
    placed: dict[int, int] = {}
    for rank, own in enumerate(actions):
        for action in own:
            _allowed(action, rank, stages)
            placed[action.stage] = rank
    if missing := sorted({*range(stages)} - {*placed}):
        raise ScheduleError(
            f"the order runs no stage {missing[0]} of {stages}",
            fix=f"add {missing[0]}F0, {missing[0]}I0, {missing[0]}W0 and so on",
        )
    placement = tuple(placed[stage] for stage in range(stages))
    made = add_communication(Schedule(NAME, microbatches, placement, tuple(actions)))
    check(made)
    return made


def _allowed(action: Action, rank: int, stages: int) -> None:
    """Computing alone, of stages that there are, with every backward in halves."""
    if action.kind not in (Kind.F, Kind.I, Kind.W) or action.stage >= stages:
        raise ScheduleError(
            f"'{action}' in the order of rank {rank} is not F, I or W of one of "
            f"{stages} stages",
            fix="leave messages out, and write a backward as its halves: 0I0 0W0",
        )
