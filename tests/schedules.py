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


def bubble_formula(ranks: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """The idle fraction of GPipe and 1F1B with equal stages: (p - 1) / (v m + p - 1).

    A slot is one forward and one backward of a microbatch on one of a rank's v stages:
    each rank works v m of the v m + p - 1 slots until the last rank is done (if m >= p,
    or v = 1). Huang 2019 (arXiv:1811.06965, section 2.3) gives the idle ones as a
    fraction of the time that passes, which is this and `Timeline.bubble`. Narayanan
    2021 (arXiv:2104.04473, section 2.2) divides the same p - 1 slots by the v m slots
    of ideal time, and so quotes (p - 1) / (v m).
    """
    slots = stages_per_rank * microbatches
    return (ranks - 1) / (slots + ranks - 1)
