"""A simulated step as compact rows: actions, messages, the critical path, memory.

Times are whole nanoseconds. What an action waits for is a template that actions share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from autopar.passes.schedule.schedule import Action
from autopar.passes.schedule.simulate_schedule import Span
from autopar.passes.schedule.step_run import COMPUTE, Event, StepRun
from autopar.reports.simulation import run_data

NANO = 1e9
ROUNDING = 1e-9  # of a step: starts and ends that are the same


def step_data(run: StepRun) -> dict[str, Any]:
    """templates: kind, stage and length of actions that are alike, and their
    collectives: (what, start within the action, length, calls, bytes, overlapped).
    actions: of each pipeline rank, template, microbatch and idle time before it, three
    numbers each. once: of each rank, what it does beside microbatches. critical: (rank,
    start, length, what, whether it is a message). levels: bytes; memory: of each rank,
    time since the one before and which level it has from then on, two numbers each.
    """
    ranks = range(len(run.memory))
    templates: dict[tuple[Any, ...], int] = {}
    levels: dict[int, int] = {}
    once: list[list[list[Any]]] = [[] for _ in ranks]
    for e in run.events:
        if e.action is None:
            w = e.work
            times = _time(e.start), _time(w.seconds)
            once[e.rank].append([w.label, w.stream, *times, w.calls, w.bytes])
    return {
        "run": run_data(run),
        "schedule": run.timeline.schedule.name,
        "stage_to_rank": list(run.timeline.schedule.stage_to_rank),
        "actions": _actions(run, templates),
        "templates": [[*key[:3], list(map(list, key[3]))] for key in templates],
        "once": once,
        "critical": [*critical_path(run)],
        "memory": [_changes(points, levels) for points in run.memory],
        "levels": list(levels),
    }


def _actions(run: StepRun, templates: dict[tuple[Any, ...], int]) -> list[list[int]]:
    inside: dict[tuple[int, Action], list[Event]] = {}
    own: list[list[Event]] = [[] for _ in run.memory]
    for e in run.events:
        if e.action is None:
            continue
        if e.work.stream != COMPUTE:
            inside.setdefault((e.rank, e.action), []).append(e)
        elif e.action.kind.is_compute:
            own[e.rank].append(e)
    actions: list[list[int]] = []
    for rank, events in enumerate(own):
        row: list[int] = []
        end = 0
        for e in events:
            assert e.action is not None, "events of the schedule have an action"
            start, length = _time(e.start), _time(e.work.seconds)
            beside = _template(e, inside.get((rank, e.action), []))
            key = (e.action.kind.value, e.action.stage, length, beside)
            number = templates.setdefault(key, len(templates))
            row += (number, e.action.microbatch, start - end)
            end = start + length
        actions.append(row)
    return actions


def _changes(
    points: Sequence[tuple[float, float]], levels: dict[int, int]
) -> list[int]:
    """(time since the last, level) of changes that last, and of the peak."""
    peak, (end, _) = max(amount for _, amount in points), points[-1]
    row: list[int] = []
    last, level = 0, -1
    for (at, amount), (following, _) in pairwise([*points, (end + 1, 0.0)]):
        if amount != peak and _time(following) == _time(at):
            continue
        number = levels.setdefault(round(amount), len(levels))
        if number != level:
            row += (_time(at) - last, number)
            last, level = _time(at), number
    return row


def _template(action: Event, inside: Sequence[Event]) -> tuple[Any, ...]:
    return tuple(
        (
            e.work.label,
            _time(e.start - action.start),
            _time(e.work.seconds),
            e.work.calls,
            e.work.bytes,
            e.work.overlapped,
        )
        for e in inside
    )


def _time(seconds: float) -> int:
    return round(seconds * NANO)


# --- the critical path ---------------------------------------------------------------


def critical_path(run: StepRun) -> Iterator[list[Any]]:
    """What the step would end later by, if it took longer, last first: from the end of
    the step back, each action's reason to start when it does. Idle ranks are not on it.
    """
    near = ROUNDING * run.total
    yield from _end_work(run, after=True)
    spans = run.timeline.compute
    # Of several messages for one action the last that was sent counts.
    ordered = sorted(run.messages, key=lambda m: m.sent)
    comes = {(m.target, m.used): m for m in ordered}
    makers = {
        send: (rank, i)
        for rank, own in enumerate(spans)
        for i, s in enumerate(own)
        if (send := s.action.send) is not None
    }
    rank = max(range(len(spans)), key=lambda r: spans[r][-1].end if spans[r] else 0.0)
    at = len(spans[rank]) - 1
    while at >= 0:
        span: Span = spans[rank][at]
        start = run.start + span.start
        label = run.timeline.schedule.label(span.action)
        yield [rank, _time(start), _time(span.seconds), label, False]
        before = spans[rank][at - 1] if at else None
        message = comes.get((rank, start))
        if before is not None and before.end >= span.start - near:
            at -= 1
        elif message is not None:
            name = f"{message.action} to rank {rank}"
            length = _time(start) - _time(message.sent)
            yield [message.source, _time(message.sent), length, name, True]
            rank, at = makers[message.action]
        else:
            break
    yield from _end_work(run, after=False)


def _end_work(run: StepRun, after: bool) -> Iterator[list[Any]]:
    """Yields the work of the slowest rank before or after all microbatches."""
    own: dict[int, list[Event]] = {}
    end = run.start + run.timeline.total
    for e in run.events:
        if e.action is None and (e.start >= end * (1 - ROUNDING)) == after:
            own.setdefault(e.rank, []).append(e)
    if not own:
        return
    longest = max(own.values(), key=lambda events: sum(e.work.seconds for e in events))
    for e in reversed(longest):
        if e.work.seconds > 0:
            row = [e.rank, _time(e.start), _time(e.work.seconds), e.work.label, False]
            yield row
