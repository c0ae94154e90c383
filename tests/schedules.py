"""Schedules that several tests read: named ones, and some written by hand."""

from __future__ import annotations

from autopar.passes.schedule.make_schedule import SCHEDULES, make_schedule
from autopar.passes.schedule.schedule import Schedule, add_communication

# (ranks, microbatches)
SIZES = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 8), (4, 2), (4, 4), (4, 9), (8, 32)]

# Two chunks a rank; rank 1 wants 2B0's message before 2F1's, which is sent first.
LOOPED = """\
schedule looped: 2 microbatches, stages on ranks 0 1 0 1
rank 0 | 0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1
rank 1 | 1F0 1F1 3F0 3B0 1B0 3F1 3B1 1B1"""

# Down the ranks and up again: stages 1 and 2 share rank 1, and need no message.
VEE = """\
schedule vee: 2 microbatches, stages on ranks 0 1 1 0
rank 0 | 0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
rank 1 | 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"""

# Backwards in halves but for 0B2: weight gradients fill what was idle.
HALVES = """\
schedule halves: 3 microbatches, stages on ranks 0 1
rank 0 | 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0B2
rank 1 | 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"""


# Of those schedules that need more than one.
STAGES_PER_RANK = {"interleaved": 2, "looped-bfs": 2, "zb-v": 2}


def named(name: str, ranks: int, microbatches: int) -> Schedule:
    """A named schedule, with as few stages a rank as it can have."""
    return make_schedule(name, ranks, microbatches, STAGES_PER_RANK.get(name, 1))


def lowered(text: str) -> Schedule:
    return add_communication(Schedule.parse(text))


def all_schedules() -> list[Schedule]:
    made = [named(name, 3, 4) for name in SCHEDULES]
    return [*made, *map(Schedule.parse, (LOOPED, VEE, HALVES))]


def by_name(schedule: Schedule) -> str:
    return schedule.name
