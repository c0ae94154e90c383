"""Simulates a schedule: its seconds, idle shares, and a drawing."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..cost import Seconds
from ..schedule.check_schedule import WIDTH, check, columns, peak_in_flight
from ..schedule.schedule import Action, Kind, Schedule, add_communication


class Span(NamedTuple):
    """An action and the seconds at which it starts and ends.

    A RECV lasts while its rank waits for the message; a SEND takes no time.
    """

    action: Action
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The times of all actions: starts[r] and ends[r] are the seconds of
    schedule.ranks[r], action by action."""

    schedule: Schedule
    starts: tuple[Sequence[float], ...]
    ends: tuple[Sequence[float], ...]

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """The same as records, rank by rank."""
        rows = zip(self.schedule.ranks, self.starts, self.ends, strict=True)
        return tuple(tuple(map(Span, *row)) for row in rows)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Microbatches that each rank has in flight at most, see `Report`."""
        return tuple(map(peak_in_flight, self.schedule.ranks))

    @property
    def total(self) -> float:
        """Seconds from the first start to the last end."""
        return max(ends[-1] for ends in self.ends if ends)

    @cached_property
    def compute(self) -> tuple[tuple[Span, ...], ...]:
        """The spans without communication."""
        return tuple(
            tuple(span for span in spans if span.action.kind.is_compute)
            for spans in self.spans
        )

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        rows = zip(self.schedule.ranks, self.starts, self.ends, strict=True)
        return tuple(
            sum(e - s for a, s, e in zip(*row, strict=True) if a.kind.is_compute)
            for row in rows
        )

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Seconds that each rank waits, also before its first and after its last."""
        return tuple(self.total - busy for busy in self.busy)

    @property
    def elapsed(self) -> tuple[float, ...]:
        """Seconds from each rank's first compute action to the end of its last.

        Where ranks do not wait for each other between steps, a step takes the longest.
        """
        return tuple(spans[-1].end - spans[0].start for spans in self.compute)

    @property
    def bubble(self) -> float:
        """The idle fraction of all ranks' time: 1 - sum(busy) / (ranks * total)."""
        return sum(self.idle) / (len(self.spans) * self.total)

    def __str__(self) -> str:
        in_flight = " ".join(map(str, self.in_flight))
        return (
            f"{grid(self)}\ntotal {self.total:.4g} s, bubble {self.bubble:.1%}, "
            f"in flight {in_flight}"
        )


def simulate(
    schedule: Schedule,
    stages: Sequence[Seconds],
    send: float = 0.0,
    proved: bool = False,
) -> Timeline:
    """Run a schedule on paper, with or without its communication.

    stages: what a microbatch takes of each.
    send: seconds from the end of a producer until its message can be used.
    proved: it has communication and runs, as `make_schedule` made it; else it is
        checked.

    Raises ScheduleError if the schedule cannot run, ValueError for impossible seconds.
    """
    if not proved:
        if not schedule.has_communication:
            schedule = add_communication(schedule)
        check(schedule)
    seconds = kind_seconds(schedule, stages)
    if not (math.isfinite(send) and send >= 0):
        raise ValueError(f"send must be finite seconds >= 0, got {send}")
    return _run(schedule, seconds, send)


def _run(
    schedule: Schedule, seconds: Mapping[Kind, Sequence[float]], send: float
) -> Timeline:
    """Run each rank as far as what has been sent to it lets it, until all are done."""
    starts: list[list[float]] = [[] for _ in schedule.ranks]
    ends: list[list[float]] = [[] for _ in schedule.ranks]
    peers = schedule.peers
    # (sender, receiver) -> when messages arrive, which is in the order sent
    under_way: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    ready = deque(range(len(schedule.ranks)))
    while ready:
        rank = ready.popleft()
        actions, begun, done = schedule.ranks[rank], starts[rank], ends[rank]
        now = done[-1] if done else 0.0
        while len(done) < len(actions):
            stage, kind, _ = actions[len(done)]
            start = now
            if kind.is_compute:
                now = start + seconds[kind][stage]
            elif kind.is_send:
                peer = peers[kind, stage]
                under_way[rank, peer].append(start + send)
                if peer not in ready:
                    ready.append(peer)
            else:
                arrivals = under_way[peers[kind, stage], rank]
                if not arrivals:
                    break
                now = max(start, arrivals.popleft())
            begun.append(start)
            done.append(now)
    pairs = zip(ends, schedule.ranks, strict=True)
    assert all(len(own) == len(actions) for own, actions in pairs), "it cannot run"
    return Timeline(schedule, tuple(starts), tuple(ends))


def grid(source: Schedule | Timeline, width: int = WIDTH) -> str:
    """Draw one line a rank and one column a unit of time: `rank 0 | F0 F1 .  B0 --`.

    A schedule is drawn with F, I and W one unit long and B two; a timeline in units of
    its shortest action. `--` goes on with the action before, `.` is idle, and a drawing
    wider than `width` characters leaves out its middle at `…`.
    """
    if isinstance(source, Schedule):
        source = simulate(source, [Seconds(1.0, 1.0, 1.0)] * source.stages)
    compute = source.compute
    unit = min(s.seconds for spans in compute for s in spans if s.seconds > 0)
    label = source.schedule.label
    cell = max(len(label(span.action)) for spans in compute for span in spans)
    margin = len(f"rank {len(compute) - 1} |")
    # A column shows what runs at its middle: it exists if the end is beyond that.
    count = math.ceil(source.total / unit - 0.5)
    shown = columns(count, (width - margin) // (cell + 1))
    lines = []
    for rank, spans in enumerate(compute):
        drawn = [span for span in spans if span.seconds > 0]
        cells = [_cell(source.schedule, drawn, column, unit) for column in shown]
        row = "".join(f" {text:<{cell}}" for text in cells)
        lines.append(f"{f'rank {rank} |':<{margin}}{row}".rstrip())
    return "\n".join(lines)


def kind_seconds(
    schedule: Schedule, stages: Sequence[Seconds]
) -> dict[Kind, list[float]]:
    """The seconds of each kind of compute action, [stages]. Raises: ValueError."""
    if len(stages) != schedule.stages:
        raise ValueError(
            f"there are seconds for {len(stages)} stages, but schedule "
            f"{schedule.name!r} has {schedule.stages}"
        )
    for s in stages:
        if not all(math.isfinite(part) and part >= 0 for part in vars(s).values()):
            raise ValueError(f"parts of a stage must be finite seconds >= 0, got {s}")
    if not any(s.total for s in stages):
        raise ValueError("forward and backward are all zero: there is nothing to time")
    return {
        Kind.F: [s.forward for s in stages],
        Kind.B: [s.backward for s in stages],
        Kind.I: [s.input_half for s in stages],
        Kind.W: [s.weight_half for s in stages],
    }


def _cell(
    schedule: Schedule, spans: Sequence[Span], column: int | None, unit: float
) -> str:
    """The action of a rank at the middle of a column."""
    if column is None:
        return "…"
    middle = (column + 0.5) * unit
    index = bisect_right(spans, middle, key=lambda span: span.start) - 1
    if index < 0 or spans[index].end <= middle:
        return "."
    begins = spans[index].start > middle - unit
    return schedule.label(spans[index].action) if begins else "--"
