"""Processes that share the cores of a machine, and how long a schedule takes them.

Four ranks on two cores compute at half the speed while all of them are busy, but at
full speed while two wait in a pipeline. What gloo has under way takes a core as well,
since its messages are copied by threads of the ranks. Who is busy has the same part of
the cores as any other: processor sharing (Kleinrock 1967, JACM 14(2), section 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..cost import Seconds
from ..schedule.schedule import Action, Kind, Schedule, add_communication
from ..schedule.simulate_schedule import Timeline, kind_seconds, simulate

ENDED = 1e-9  # of a job's seconds: what rounding leaves of them


@dataclass(frozen=True)
class CoreContention:
    """cores: of all machines. processes: of one pipeline rank, which all do the same at
    the same time."""

    cores: float = math.inf
    processes: int = 1

    def speed(self, busy: int) -> float:
        """Returns the speed of each of the busy ranks: 1 with a core for each."""
        return min(1.0, self.cores / (self.processes * busy)) if busy else 1.0


ALONE = CoreContention()


def simulate_contention(
    schedule: Schedule,
    stages: Sequence[Seconds],
    send: float,
    contention: CoreContention,
    proved: bool = False,
) -> Timeline:
    """`simulate` where ranks share cores. All seconds are those of a process that has a
    core to itself; a message that is sent has one, too, until it is there.

    Raises: ScheduleError, ValueError, as `simulate`.
    """
    alone = simulate(schedule, stages, send, proved)
    if math.isinf(contention.cores):
        return alone
    if not schedule.has_communication:
        schedule = add_communication(schedule)
    seconds = kind_seconds(schedule, stages)
    return _Run(schedule, seconds, send, contention).timeline()


class _Run:
    """The state of a machine: each rank's action, and the work left of every job.

    A job is a rank (by its number) that computes, or a message (by its RECV).
    """

    def __init__(
        self,
        schedule: Schedule,
        seconds: Mapping[Kind, Sequence[float]],
        send: float,
        contention: CoreContention,
    ) -> None:
        self.schedule, self.contention = schedule, contention
        self.seconds, self.send = seconds, send
        self.now = 0.0
        self.left: dict[int | Action, float] = {}
        self.arrived: set[Action] = set()
        # What each rank has done ended then, and began when what was before it ended.
        self.done: list[list[float]] = [[] for _ in schedule.ranks]

    def timeline(self) -> Timeline:
        """Run to the end."""
        while True:
            while self._go_on():
                pass
            if not self.left:
                break
            speed = self.contention.speed(len(self.left))
            least = min(self.left.values())
            self.now += least / speed
            for job in list(self.left):
                self.left[job] -= least
                if self.left[job] <= ENDED * least:
                    self._end(job)
        assert all(
            len(done) == len(actions)
            for done, actions in zip(self.done, self.schedule.ranks, strict=True)
        ), "a schedule that was checked runs to its end"
        starts = tuple([0.0, *done][:-1] for done in self.done)
        return Timeline(self.schedule, starts, tuple(self.done))

    def _go_on(self) -> bool:
        """Lets ranks do actions that take no time, and begin others; whether any did
        so."""
        changed = False
        for rank in range(len(self.done)):
            while rank not in self.left and self._step(rank):
                changed = True
        return changed

    def _step(self, rank: int) -> bool:
        """Begin the next action of a rank, if it can."""
        actions = self.schedule.ranks[rank]
        if len(self.done[rank]) == len(actions):
            return False
        action = actions[len(self.done[rank])]
        if action.kind.is_compute:
            if (seconds := self.seconds[action.kind][action.stage]) > 0:
                self.left[rank] = seconds
                return True
        elif action.kind.is_send:
            if self.send > 0:
                self.left[action.partner] = self.send
            else:
                self.arrived.add(action.partner)
        elif action not in self.arrived:
            return False
        self._finish(rank)
        return True

    def _end(self, job: int | Action) -> None:
        del self.left[job]
        if isinstance(job, Action):
            self.arrived.add(job)
        else:
            self._finish(job)

    def _finish(self, rank: int) -> None:
        """The action that a rank is at ends now."""
        self.done[rank].append(self.now)
