"""fit_schedule: a schedule made for the seconds and bytes that stages really take.

Named schedules suppose equal stages. Here each rank takes, whenever it is free, what is
urgent and possible: gradients that others wait for, forwards while memory lasts, weight
halves in the gaps (the heuristic of Qi 2023, arXiv:2401.10241, section 3.1). A few such
rules are tried, on paper, beside all named schedules; the fastest that fits wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..cost import Seconds
from ..schedule.footprint import Footprint, peak_bytes
from ..schedule.list_schedule import RULES, Listed, Pipeline, list_schedule
from ..schedule.make_schedule import SCHEDULES
from ..schedule.schedule import Action, Kind, Schedule, ScheduleError, add_communication
from ..schedule.simulate_schedule import simulate

# The rank of each stage -> bytes for activations on each rank.
Limits = Callable[[Sequence[int]], Sequence[float]]


def unlimited(placement: Sequence[int]) -> list[float]:
    """Returns an unbounded memory limit for each rank."""
    return [math.inf] * (max(placement) + 1)


@dataclass(frozen=True)
class Fitted:
    """A schedule with its messages, its backwards in halves, and its seconds a step.

    named: the fastest named schedule that fits, in halves too; None: none does.
    """

    schedule: Schedule
    seconds: float
    named: Schedule | None
    named_seconds: float | None


def fit_schedule(
    microbatches: int,
    ranks: int,
    stages_per_rank: int,
    seconds: Sequence[Seconds],
    footprints: Sequence[Footprint],
    limits: Limits = unlimited,
    send: float = 0.0,
    steps_overlap: bool = False,
) -> Fitted:
    """The fastest schedule found; never slower than a named one that fits.

    seconds, footprints: of one microbatch on each stage, [stages]. limits: the rank of
    each stage -> bytes that activations may take, [ranks]. send: seconds of a message.
    steps_overlap: a rank begins its next step when it is done, and waits for nobody.
    Raises ScheduleError if not even one microbatch at a time fits.
    """
    best: list[Listed] = []  # those that fit and are as fast as any, up to rounding

    def offer(listed: Listed) -> None:
        if best and listed.seconds > _as_fast(best):
            return
        whole = listed.schedule
        if not whole.has_communication:
            whole = add_communication(whole)
        if fits(whole, footprints, limits(whole.stage_to_rank)):
            best.append(replace(listed, schedule=whole))
            best[:] = (each for each in best if each.seconds <= _as_fast(best))

    names = named_schedules(ranks, microbatches, stages_per_rank)
    known = [on_paper(named, seconds, send, steps_overlap) for named in names]
    for listed in sorted(known, key=lambda listed: listed.seconds):
        offer(listed)
    named = best[0] if best else None
    for placement in _placements(ranks, stages_per_rank):
        rooms = limits(placement)
        job = Pipeline(
            microbatches, placement, seconds, footprints, rooms, send, steps_overlap
        )
        for rule in RULES:
            if made := list_schedule(job, rule, _as_fast(best)):
                offer(made)
    if not best:
        raise _too_little(footprints, limits, _placements(ranks, stages_per_rank)[0])
    best.sort(key=lambda listed: listed.seconds)
    least = min(best, key=lambda listed: _peak(listed.schedule, footprints))
    return Fitted(
        least.schedule,
        least.seconds,
        named.schedule if named else None,
        named.seconds if named else None,
    )


def _as_fast(best: Sequence[Listed]) -> float:
    """The seconds up to which a schedule is as fast as the best."""
    fastest = min((listed.seconds for listed in best), default=math.inf)
    return fastest * (1 + 1e-12)


def named_schedules(
    ranks: int, microbatches: int, stages_per_rank: int
) -> Iterator[Schedule]:
    """Yields the schedules that run so many stages a rank, with backwards in halves."""
    for named in SCHEDULES.values():
        try:
            schedule = named.make(ranks, microbatches, stages_per_rank)
        except ScheduleError:
            continue  # it runs another number of stages a rank
        yield in_halves(schedule)


def in_halves(schedule: Schedule) -> Schedule:
    """The same with each full backward as I and W in a row, which is never slower."""
    ranks = tuple(tuple(_halved(actions)) for actions in schedule.ranks)
    return replace(schedule, ranks=ranks)


def _halved(actions: Iterable[Action]) -> Iterator[Action]:
    for action in actions:
        if action.kind is Kind.B:
            yield action._replace(kind=Kind.I)
            yield action._replace(kind=Kind.W)
        else:
            yield action


def _placements(ranks: int, stages_per_rank: int) -> list[tuple[int, ...]]:
    """Stages on ranks to try: in rounds; two a rank also down and up again."""
    rounds = tuple(range(ranks)) * stages_per_rank
    vee = (*range(ranks), *reversed(range(ranks)))
    return [rounds, vee] if stages_per_rank == 2 and ranks > 1 else [rounds]


def on_paper(
    schedule: Schedule,
    seconds: Sequence[Seconds],
    send: float,
    steps_overlap: bool = False,
) -> Listed:
    """A named schedule with its messages, and how long a step takes, see
    `fit_schedule`."""
    schedule = add_communication(schedule)
    timeline = simulate(schedule, seconds, send, proved=True)
    return Listed(schedule, max(timeline.elapsed) if steps_overlap else timeline.total)


def _peak(schedule: Schedule, footprints: Sequence[Footprint]) -> int:
    ranks = range(len(schedule.ranks))
    return max(peak_bytes(schedule, rank, footprints) for rank in ranks)


def fits(
    schedule: Schedule, footprints: Sequence[Footprint], limits: Sequence[float]
) -> bool:
    """Whether each rank's activations stay within its limit in bytes, [ranks].

    schedule: with its messages.
    """
    return all(
        peak_bytes(schedule, rank, footprints) <= limit
        for rank, limit in enumerate(limits)
    )


def _one_by_one(placement: Sequence[int]) -> Schedule:
    """One microbatch, there and back."""
    lines: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        lines[rank].append(Action(stage, Kind.F, 0))
    for stage, rank in reversed([*enumerate(placement)]):
        lines[rank] += [Action(stage, Kind.I, 0), Action(stage, Kind.W, 0)]
    return Schedule("once", 1, tuple(placement), tuple(map(tuple, lines)))


def _too_little(
    footprints: Sequence[Footprint], limits: Limits, placement: Sequence[int]
) -> ScheduleError:
    """Say which rank needs how much for one microbatch at a time."""
    once = add_communication(_one_by_one(placement))
    lacking = []
    for rank, limit in enumerate(limits(placement)):
        need = peak_bytes(once, rank, footprints)
        lacking.append((need - limit, rank, need))
    over, rank, need = max(lacking)
    over = max(over, 1)
    return ScheduleError(
        f"no schedule fits: pipeline rank {rank} needs {need} bytes for the activations"
        f" of one microbatch, {over:.0f} more than it has",
        fix='use schedule="1f1b", whose backwards are whole and need less; more '
        "microbatches, a larger tp, or more memory",
    )
