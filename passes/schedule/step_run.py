"""A whole step on paper, event by event: what each pipeline rank does, and has alive.

The action lists are those that ranks interpret; around them stands what is done once a
step: parameters gathered before, gradients reduced and weights updated after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..cost import Seconds
from ..schedule.core_contention import ALONE, CoreContention, simulate_contention
from ..schedule.footprint import (
    BACKWARD,
    FORWARD,
    NO_BYTES,
    WEIGHT,
    Footprint,
    bytes_alive,
)
from ..schedule.schedule import Action, Kind, Schedule
from ..schedule.simulate_schedule import Span, Timeline

COMPUTE, COMMUNICATION = "compute", "communication"
PARTS_OF = {
    Kind.F: (FORWARD,),
    Kind.B: (BACKWARD, WEIGHT),
    Kind.I: (BACKWARD,),
    Kind.W: (WEIGHT,),
}


@dataclass(frozen=True)
class Work:
    """Work that takes a rank some seconds, on one of its streams.

    overlapped: it runs beside the computing. calls, bytes: of a collective, where they
    are known.
    """

    label: str
    seconds: float
    stream: str = COMMUNICATION
    overlapped: bool = False
    calls: float | None = None
    bytes: float | None = None


@dataclass(frozen=True)
class StageWork:
    """One microbatch on a stage's rank.

    computing: forward, backward (its input half) and weight (its other half) ->
    seconds. collectives: the same -> those of it. send: seconds of a message to a
    neighbour. footprint: of its activations and messages.
    """

    layers: str
    computing: Mapping[str, float]
    collectives: Mapping[str, tuple[Work, ...]] = field(default_factory=dict)
    send: float = 0.0
    footprint: Footprint = NO_BYTES

    def seconds(self, part: str) -> float:
        """Seconds of a part; overlapped collectives count as far as they are longer."""
        computing, moving = self.computing[part], self.collectives.get(part, ())
        overlapped = sum(w.seconds for w in moving if w.overlapped)
        exposed = sum(w.seconds for w in moving if not w.overlapped)
        return max(computing, overlapped) + exposed


@dataclass(frozen=True)
class RankWork:
    """What a pipeline rank does once a step, before and after the microbatches.

    rest: bytes that it holds all the time.
    """

    before: tuple[Work, ...] = ()
    after: tuple[Work, ...] = ()
    rest: float = 0.0


@dataclass(frozen=True)
class Event:
    """An event on a rank from `start` on. action: None outside of the schedule."""

    rank: int
    work: Work
    start: float
    action: Action | None = None
    layers: str = ""


@dataclass(frozen=True)
class Message:
    """A message from an action that ends at `sent` to one that begins at `used`."""

    action: Action
    source: int
    sent: float
    target: int
    used: float


@dataclass(frozen=True)
class StepRun:
    """timeline: the microbatches alone, which begin at `start`. memory: of each rank,
    (seconds, bytes from then on)."""

    timeline: Timeline
    start: float
    total: float
    events: tuple[Event, ...]
    messages: tuple[Message, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which a rank computes, or waits for its own collectives."""
        busy = list(self.timeline.busy)
        for event in self.events:
            if event.action is None:
                busy[event.rank] += event.work.seconds
        return tuple(busy)

    @property
    def idle(self) -> tuple[float, ...]:
        return tuple(self.total - busy for busy in self.busy)

    @property
    def peak(self) -> tuple[float, ...]:
        """The most bytes that each rank has alive."""
        return tuple(max(amount for _, amount in points) for points in self.memory)


def run_step(
    schedule: Schedule,
    stages: Sequence[StageWork],
    ranks: Sequence[RankWork],
    contention: CoreContention = ALONE,
    proved: bool = False,
) -> StepRun:
    """Run a step. stages, ranks: of the schedule's. proved: see `simulate`.
    Raises: ScheduleError."""
    parts = FORWARD, BACKWARD, WEIGHT
    timeline = simulate_contention(
        schedule,
        [Seconds(*map(stage.seconds, parts)) for stage in stages],
        max((stage.send for stage in stages), default=0.0),
        contention,
        proved,
    )
    start = max(sum(w.seconds for w in rank.before) for rank in ranks)
    end = start + timeline.total
    total = end + max(sum(w.seconds for w in rank.after) for rank in ranks)
    events: list[Event] = []
    schedule, alone = timeline.schedule, contention == ALONE
    for rank, work in enumerate(ranks):
        events += _in_turn(rank, work.before, 0.0)
        for span in timeline.spans[rank]:
            stage = stages[span.action.stage]
            events += _of_span(rank, span, stage, start, schedule.label, alone)
        events += _in_turn(rank, work.after, end)
    return StepRun(
        timeline,
        start,
        total,
        tuple(events),
        tuple(_messages(timeline, start)),
        tuple(
            tuple(_memory(timeline, stages, rank, work.rest, start))
            for rank, work in enumerate(ranks)
        ),
    )


def _in_turn(
    rank: int,
    works: Sequence[Work],
    start: float,
    action: Action | None = None,
    layers: str = "",
) -> list[Event]:
    events = []
    for work in works:
        events.append(Event(rank, work, start, action, layers))
        start += work.seconds
    return events


def _of_span(
    rank: int,
    span: Span,
    stage: StageWork,
    start: float,
    label: Callable[[Action], str],
    alone: bool,
) -> list[Event]:
    """An action; beside it its collectives: those overlapped at its begin, the rest at
    its end (where in between they are is not known). alone: whether no other rank slows
    it down."""
    action, begin = span.action, start + span.start
    if action.kind.is_recv and span.seconds > 0:
        wait = Work(f"wait for {action}", span.seconds)
        return [Event(rank, wait, begin, action, stage.layers)]
    if not action.kind.is_compute:
        return []
    whole = Work(label(action), span.seconds, COMPUTE)
    events = [Event(rank, whole, begin, action, stage.layers)]
    usual = 0.0 if alone else sum(map(stage.seconds, PARTS_OF[action.kind]))
    slower = span.seconds / usual if usual else 1.0
    for part in PARTS_OF[action.kind]:
        moving: Sequence[Work] = stage.collectives.get(part, ())
        if slower != 1.0:
            moving = [replace(w, seconds=slower * w.seconds) for w in moving]
        overlapped = [w for w in moving if w.overlapped]
        exposed = [w for w in moving if not w.overlapped]
        end = begin + slower * stage.seconds(part)
        later = end - sum(w.seconds for w in exposed)
        events += _in_turn(rank, overlapped, begin, action, stage.layers)
        events += _in_turn(rank, exposed, later, action, stage.layers)
        begin = end
    return events


def _messages(timeline: Timeline, start: float) -> list[Message]:
    """The messages, each from the end of its producer to the begin of its first use."""
    schedule = timeline.schedule
    made: dict[Action, tuple[int, float]] = {}
    used: dict[Action, tuple[int, float]] = {}
    for rank, spans in enumerate(timeline.compute):
        for span in spans:
            if (send := span.action.send) and schedule.crosses(send):
                made[send] = rank, start + span.end
            if (recv := span.action.recv) and schedule.crosses(recv):
                used[recv] = rank, start + span.start
    return [Message(send, *end, *used[send.partner]) for send, end in made.items()]


def _memory(
    timeline: Timeline,
    stages: Sequence[StageWork],
    rank: int,
    rest: float,
    start: float,
) -> list[tuple[float, float]]:
    """Bytes over time: (second, bytes alive while an action runs, and after it)."""
    own = [i for i, r in enumerate(timeline.schedule.stage_to_rank) if r == rank]
    ends = rest + sum(stages[i].footprint.edges for i in own)
    footprints = [stage.footprint for stage in stages]
    first, *alive = bytes_alive(timeline.schedule, rank, footprints)
    points = [(0.0, ends), (start, rest + first)]
    rows = (amounts.tolist() for amounts in alive)
    for span, most, after in zip(timeline.spans[rank], *rows, strict=True):
        points.append((start + span.start, rest + most))
        points.append((start + span.end, rest + after))
    return [*points, (start + timeline.total, ends)]
