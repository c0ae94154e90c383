"""Prove, before anything runs, that a schedule can run.

Everything an action needs comes from earlier in its own rank's list, except that a RECV
needs the matching SEND of another rank. So all faults but deadlock show by reading the
lists, and deadlock shows by running them with sends that do not block.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ..schedule.schedule import Action, Kind, Schedule, ScheduleError

WIDTH = 88  # characters in a line of a drawn schedule
# What must have run before on the same stage and microbatch.
_AFTER = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.SEND_F: Kind.F, Kind.W: Kind.I}
_LOWER = "it has no messages yet: check(add_communication(schedule))"


@dataclass(frozen=True)
class Report:
    """What a correct schedule does.

    order: all actions, each with its rank, in one order in which they can happen: the
        proof that there is no deadlock, and a way to run all ranks in one process.
    in_flight: per rank, the most (stage, microbatch) pairs whose forward is done and
        whose backward (W, where it is split) is not: what activations are kept for.
    """

    order: tuple[tuple[int, Action], ...]
    in_flight: tuple[int, ...]


class _Place(NamedTuple):
    """The position of an action: its rank, and the index in that rank's list."""

    rank: int
    at: int


@lru_cache(maxsize=4)  # it is asked for each time that a schedule is timed
def check(schedule: Schedule) -> Report:
    """Prove that a schedule with communication runs every stage on every microbatch.

    Raises ScheduleError, which draws the lists and marks a rank, for: an action that is
    missing, doubled, on a wrong rank or out of range; a backward before its forward, W
    before I, a forward before its input; a message without its other end, or out of
    order within its pair of ranks; deadlock.
    """
    places = _locate(schedule)
    _check_complete(schedule, places)
    _check_needs(schedule, places)
    _check_messages(schedule, places)
    in_flight = tuple(map(peak_in_flight, schedule.ranks))
    return Report(_run(schedule), in_flight)


def peak_in_flight(actions: Iterable[Action]) -> int:
    """The most forwards of one rank that wait for their backward at the same time."""
    # The input of a linear layer is kept until its weight gradient is computed, so the
    # input-gradient half releases nothing.
    more = {Kind.F: 1, Kind.B: -1, Kind.W: -1}
    changes = (more[a.kind] for a in actions if a.kind in more)
    return max(accumulate(changes, initial=0))


def columns(count: int, fit: int) -> list[int | None]:
    """The columns to draw: all, or the first and last ones around None for a gap."""
    if count <= fit:
        return list(range(count))
    head = max(fit // 2, 1)
    tail = max(fit - head - 1, 1)
    return [*range(head), None, *range(count - tail, count)]


def _locate(schedule: Schedule) -> dict[Action, _Place]:
    """Finds every action. Each must occur once, on the rank of a stage that exists."""
    places: dict[Action, _Place] = {}
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            here = _Place(rank, index)
            fault = _misplaced(schedule, action, rank)
            if action in places:
                first = places[action]
                fault = f"is a duplicate of action {first.at} of rank {first.rank}"
            if fault:
                raise _error(schedule, here, fault)
            places[action] = here
    return places


def _misplaced(schedule: Schedule, action: Action, rank: int) -> str | None:
    """Why an action cannot be on this rank at all, or None."""
    if not 0 <= action.stage < schedule.stages:
        return f"is of no stage: there are {schedule.stages}, counted from 0"
    if not 0 <= action.microbatch < schedule.microbatches:
        return f"is of no microbatch: there are {schedule.microbatches}, counted from 0"
    if (home := schedule.stage_to_rank[action.stage]) != rank:
        return f"is on the wrong rank: stage {action.stage} lives on rank {home}"
    if not action.kind.is_compute and not schedule.crosses(action):
        return "has no other end: no stage of another rank is next to it on that side"
    return None


def _check_complete(schedule: Schedule, places: Mapping[Action, _Place]) -> None:
    """Checks that each stage runs each microbatch: F, and either B or both I and W."""
    for stage, rank in enumerate(schedule.stage_to_rank):
        for microbatch in range(schedule.microbatches):
            full, half, weight = (
                Action(stage, kind, microbatch) for kind in (Kind.B, Kind.I, Kind.W)
            )
            split = half in places or weight in places
            if split and full in places:
                raise _error(schedule, places[full], "is there beside its halves")
            backward = [half, weight] if split else [full]
            for action in [Action(stage, Kind.F, microbatch), *backward]:
                if action not in places:
                    end = _Place(rank, len(schedule.ranks[rank]))
                    raise _error(schedule, end, f"{action} is missing")


def _check_needs(schedule: Schedule, places: Mapping[Action, _Place]) -> None:
    """Checks that what an action needs from its own rank stands before it."""
    for action, place in places.items():
        for needed in _needs(schedule, action, places):
            if needed not in places:
                why = f"waits for {needed}, which is not there"
                fix = "" if schedule.has_communication else _LOWER
                raise _error(schedule, place, why, fix=fix)
            if (later := places[needed].at) > place.at:
                why = f"waits for {needed}, which comes later (action {later})"
                raise _error(schedule, place, why)


def _needs(
    schedule: Schedule, action: Action, places: Mapping[Action, _Place]
) -> list[Action]:
    """What has to be done before on the same rank. A RECV needs nothing there."""
    stage, kind, microbatch = action

    def backward(stage: int) -> Action:
        """The action that makes the gradient of a stage's input."""
        half = Action(stage, Kind.I, microbatch)
        return half if half in places else Action(stage, Kind.B, microbatch)

    needed: list[Action] = []
    if kind in _AFTER:
        needed.append(Action(stage, _AFTER[kind], microbatch))
    elif kind is Kind.SEND_B:
        needed.append(backward(stage))
    if recv := action.recv:
        source = recv.other_stage
        if schedule.crosses(recv):
            needed.append(recv)
        elif 0 <= source < schedule.stages:
            forward = Action(source, Kind.F, microbatch)
            needed.append(forward if kind is Kind.F else backward(source))
    return needed


def _check_messages(schedule: Schedule, places: Mapping[Action, _Place]) -> None:
    """Checks that each message has both ends, in one order for each pair of ranks."""
    # (sender, receiver) -> messages, each named by its RECV
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for action, place in places.items():
        if action.kind.is_compute:
            continue
        other, peer = action.partner, schedule.peer(action)
        if action.kind.is_send:
            sent[place.rank, peer].append(other)
            continue
        if other not in places:
            why = f"waits for {other}, which rank {peer} never does"
            raise _error(schedule, place, why)
        received[peer, place.rank].append(action)
    # A SEND without a RECV is not met here: what consumes it lacked its operand.
    for (sender, receiver), messages in sent.items():
        for message, recv in zip(messages, received[sender, receiver], strict=True):
            if message != recv:
                why = (
                    f"waits for {recv.partner}, but rank {sender} does "
                    f"{message.partner} first: one pair of ranks, one order"
                )
                raise _error(schedule, places[recv], why)


def _run(schedule: Schedule) -> tuple[tuple[int, Action], ...]:
    """Run all lists until done, waiting at each RECV; the order in which they ran."""
    order: list[tuple[int, Action]] = []
    at = [0] * len(schedule.ranks)
    # (sender, receiver) -> messages under way, which arrive in the order sent
    sent: dict[tuple[int, int], int] = defaultdict(int)
    ready = deque(range(len(schedule.ranks)))
    while ready:
        rank = ready.popleft()
        actions = schedule.ranks[rank]
        while at[rank] < len(actions):
            stage, kind, _ = action = actions[at[rank]]
            if not kind.is_compute:
                peer = schedule.peers[kind, stage]
                if kind.is_send:
                    sent[rank, peer] += 1
                    if peer not in ready:
                        ready.append(peer)
                elif sent[peer, rank]:
                    sent[peer, rank] -= 1
                else:
                    break
            at[rank] += 1
            order.append((rank, action))
    stuck = {r: i for r, i in enumerate(at) if i < len(schedule.ranks[r])}
    if stuck:
        raise _deadlock(schedule, _locate(schedule), stuck)
    return tuple(order)


def _deadlock(
    schedule: Schedule, places: Mapping[Action, _Place], stuck: Mapping[int, int]
) -> ScheduleError:
    """The error, with a rank of the cycle (others may only wait) and all waits."""
    waits = {rank: schedule.ranks[rank][index] for rank, index in stuck.items()}
    rank = min(waits)
    for _ in waits:
        rank = schedule.peer(waits[rank])
    why = f"waits for {waits[rank].partner} in a deadlock: the ranks wait in a circle"
    lines = []
    for waiting, action in waits.items():
        there = places[action.partner]
        lines.append(
            f"rank {waiting} waits at {action} (action {stuck[waiting]}) for "
            f"{action.partner} (action {there.at} of rank {there.rank})"
        )
    return _error(schedule, _Place(rank, stuck[rank]), why, stops=stuck, notes=lines)


def _error(
    schedule: Schedule,
    place: _Place,
    why: str,
    *,
    stops: Mapping[int, int] | None = None,
    notes: Iterable[str] = (),
    fix: str = "",
) -> ScheduleError:
    """Say why, and draw each rank's compute actions up to where it stops.

    stops: rank -> index of the action that it cannot pass; by default only `place`.
    """
    stops = stops or {place.rank: place.at}
    rows = []
    for rank, actions in enumerate(schedule.ranks):
        stop = stops.get(rank, len(actions))
        cells = [schedule.label(a) for a in actions[:stop] if a.kind.is_compute]
        cells += map(str, actions[stop : stop + 1])
        mark = "  <-- ERROR HERE" if rank == place.rank else ""
        rows.append(_row(rank, cells) + mark)
    actions = schedule.ranks[place.rank]
    if place.at < len(actions):
        why = f"{actions[place.at]} (action {place.at}) {why}"
    head = f"schedule {schedule.name}, rank {place.rank}: {why}"
    return ScheduleError("\n  ".join([head, *rows, *notes]), fix=fix)


def _row(rank: int, cells: Sequence[str]) -> str:
    """One line of an error: cells are in order, not in time."""
    room = WIDTH - len("  rank 00 |" + "  <-- ERROR HERE")
    fit = room // (1 + max(map(len, cells), default=1))
    shown = ["…" if c is None else cells[c] for c in columns(len(cells), fit)]
    return " ".join([f"rank {rank} |", *shown])
