"""list_schedule: run a pipeline on paper, each rank choosing what it does by a rule.

What comes out is only an order; `simulate` says how long it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import starmap

from ..cost import Seconds
from ..schedule.footprint import Footprint
from ..schedule.schedule import Action, Kind, Schedule


@dataclass(frozen=True)
class Rule:
    """How a free rank chooses among what it could do.

    first: "backward", "forward", or "turns": the other of the two than last time.
    patience: a weight half is begun if that part of it fits before the next thing that
        is known to arrive: 1 all of it, 0 always.
    ahead: forwards that may wait for their backward, as a multiple of the stages from
        there to the last; memory limits them too.
    late: weight halves that may wait while forwards remain, as a multiple of the stages
        before: so many wait in vain in the end, and fill what is idle there.
    """

    first: str
    patience: float
    ahead: float
    late: float


# On random uneven pipelines, no other rule adds 0.1 % to what these reach together.
RULES = (
    Rule("turns", 0.0, math.inf, math.inf),
    Rule("turns", 0.5, 1.5, 2.0),
    Rule("backward", 0.0, 1.5, math.inf),
    Rule("forward", 0.0, 1.0, 1.0),
    Rule("forward", 0.5, 1.5, 1.0),
    Rule("backward", 1.0, 1.5, 2.0),
    Rule("turns", 0.5, 1.0, 1.0),
    Rule("backward", 0.5, 2.0, 2.0),
    Rule("turns", 1.0, 1.0, 1.0),
    Rule("turns", 0.0, 2.0, math.inf),
    Rule("turns", 0.5, 2.0, math.inf),
)


ROUNDED = 1 + 1e-9  # sums of the same seconds in another order are no larger


@dataclass(frozen=True)
class Pipeline:
    """The pipeline to schedule: see `fit_schedule`. placement: stage -> rank."""

    microbatches: int
    placement: Sequence[int]
    seconds: Sequence[Seconds]
    footprints: Sequence[Footprint]
    limits: Sequence[float]
    send: float
    steps_overlap: bool


@dataclass(frozen=True)
class Listed:
    """A schedule, and the seconds of a step."""

    schedule: Schedule
    seconds: float


def list_schedule(job: Pipeline, rule: Rule, most: float = math.inf) -> Listed | None:
    """The order that comes of a rule; None where memory does not let it begin, or if it
    takes longer than `most` seconds."""
    ranks = [_Rank(job, rule, rank) for rank in range(len(job.limits))]
    if any(rank.budget < rank.whole for rank in ranks):
        return None
    events = [(0.0, rank.index) for rank in ranks]
    while events:
        now, index = heappop(events)
        rank = ranks[index]
        if now < rank.free:
            continue
        step = rank.choose(now)
        if step is None:
            if (again := rank.next_arrival(now)) < math.inf:
                heappush(events, (again, index))
            continue
        kind, stage = step
        for at, there, tensor in rank.run(kind, stage, now):
            ranks[job.placement[there]].arrivals[tensor][there].append(at)
            heappush(events, (at, job.placement[there]))
        if rank.idle + rank.work > most * ROUNDED:
            return None
        heappush(events, (rank.free, index))
    lists = tuple(tuple(starmap(Action, rank.actions)) for rank in ranks)
    wanted = 3 * len(job.placement) * job.microbatches
    assert sum(map(len, lists)) == wanted, "a rank is left waiting"
    made = Schedule("made", job.microbatches, tuple(job.placement), lists)
    begins = [rank.begin if job.steps_overlap else 0.0 for rank in ranks]
    took = [rank.free - begin for rank, begin in zip(ranks, begins, strict=True)]
    return Listed(made, max(took))


@dataclass
class _Rank:
    """One rank's state at a time: actions done, and operands arrived.

    idle: seconds of a step in which it did nothing, so far.
    """

    job: Pipeline
    rule: Rule
    index: int
    begin: float = 0.0
    free: float = 0.0
    idle: float = 0.0
    last: Kind = Kind.W
    held: int = 0
    actions: list[tuple[int, Kind, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        job = self.job
        self.stages = [s for s, r in enumerate(job.placement) if r == self.index]
        self.done = {k: dict.fromkeys(self.stages, 0) for k in (Kind.F, Kind.I, Kind.W)}
        # When the operands of the next F and I can be used, in microbatch order.
        self.arrivals: dict[Kind, dict[int, list[float]]] = {
            k: {s: [] for s in self.stages} for k in (Kind.F, Kind.I)
        }
        if self.stages[0] == 0:
            self.arrivals[Kind.F][0] = [0.0] * job.microbatches
        stages = len(job.placement)
        self.ahead = {
            s: min(self.rule.ahead * (stages - s), job.microbatches)
            for s in self.stages
        }
        self.each = {s: job.footprints[s].each for s in self.stages}
        self.late = {s: job.footprints[s].weight_residuals for s in self.stages}
        self.whole = sum(self.each.values())
        # What the later stages need for one microbatch stays free, or else those in
        # flight might never reach their backward.
        self.needed = {
            s: sum(self.each[t] for t in self.stages if t >= s) for s in self.stages
        }
        # Beside what waits, the most that any action needs while it runs.
        most = max(job.footprints[s].working for s in self.stages)
        step = sum(job.footprints[s].step for s in self.stages)
        self.budget = job.limits[self.index] - most - step
        took = (job.seconds[s] for s in self.stages)
        each = sum(t.forward + t.input_half + t.weight_half for t in took)
        self.work = job.microbatches * each

    def choose(self, now: float) -> tuple[Kind, int] | None:
        """What to begin now; None: wait for something to arrive."""
        turn = self.rule.first == "turns" and self.last is not Kind.F
        late = self.rule.first == "forward" or turn  # backwards come after forwards
        if not late and (stage := self._deepest(Kind.I, now)) is not None:
            return Kind.I, stage
        weight = self._weight_half()
        if weight is not None and self._overdue(weight) and self._has_time(weight, now):
            return Kind.W, weight
        if (stage := self._deepest(Kind.F, now)) is not None:
            return Kind.F, stage
        if late and (stage := self._deepest(Kind.I, now)) is not None:
            return Kind.I, stage
        if weight is not None and self._has_time(weight, now):
            return Kind.W, weight
        return None

    def _weight_half(self) -> int | None:
        """The stage of a weight half that waits."""
        halves, done = self.done[Kind.I], self.done[Kind.W]
        for stage in self.stages:
            if done[stage] < halves[stage]:
                return stage
        return None

    def _has_time(self, stage: int, now: float) -> bool:
        """Whether so much of the stage's weight half as is asked for can be done before
        something arrives."""
        needed = self.rule.patience * self.job.seconds[stage].weight_half
        return not needed or now + needed <= self.next_arrival(now)

    def _overdue(self, stage: int) -> bool:
        """Whether too many wait, while there are forwards to come."""
        waiting = self.done[Kind.I][stage] - self.done[Kind.W][stage]
        more = self.done[Kind.F][stage] < self.job.microbatches
        return more and waiting > self.rule.late * stage

    def _deepest(self, kind: Kind, now: float) -> int | None:
        """Returns the stage nearest to the loss that could begin the action."""
        finished, arrivals = self.done[kind], self.arrivals[kind]
        for stage in reversed(self.stages):
            done, arrived = finished[stage], arrivals[stage]
            there = done < len(arrived) and arrived[done] <= now
            if there and (kind is Kind.I or self._may_begin(stage)):
                return stage
        return None

    def _may_begin(self, stage: int) -> bool:
        """Whether there is room for one more forward."""
        waiting = self.done[Kind.F][stage] - self.done[Kind.I][stage]
        if waiting >= self.ahead[stage]:
            return False
        return self.held + self.needed[stage] <= self.budget

    def next_arrival(self, now: float) -> float:
        """The first time after `now` when an action that may begin has its operand."""
        first = math.inf
        for kind, arrivals in self.arrivals.items():
            finished = self.done[kind]
            for stage, arrived in arrivals.items():
                done = finished[stage]
                if done == len(arrived) or not now < arrived[done] < first:
                    continue
                if kind is Kind.I or self._may_begin(stage):
                    first = arrived[done]
        return first

    def run(self, kind: Kind, stage: int, now: float) -> list[tuple[float, int, Kind]]:
        """Do it; what it makes arrive: (when, at which stage, operand of what)."""
        job, seconds = self.job, self.job.seconds[stage]
        self.begin = self.begin if self.actions else now
        if self.actions or not job.steps_overlap:
            self.idle += now - self.free
        self.actions.append((stage, kind, self.done[kind][stage]))
        self.done[kind][stage] += 1
        if kind is Kind.W:
            self.free = now + seconds.weight_half
            self.held -= self.late[stage]
            return []
        self.last = kind
        if kind is Kind.F:
            self.free = now + seconds.forward
            self.held += self.each[stage]
            if stage == len(job.placement) - 1:
                return [(self.free, stage, Kind.I)]
            to = stage + 1
        else:
            self.free = now + seconds.input_half
            self.held -= self.each[stage] - self.late[stage]
            if stage == 0:
                return []
            to = stage - 1
        near = job.placement[to] == self.index
        return [(self.free + (0.0 if near else job.send), to, kind)]
