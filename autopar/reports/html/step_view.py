"""A simulated step as compact rows: actions, messages, the critical path, memory.

Times are whole nanoseconds. What an action waits for is a template that actions share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autopar.passes.schedule.schedule import Action
from autopar.passes.schedule.simulate_schedule import Span
from autopar.passes.schedule.step_run import COMPUTE, Event, StepRun
from autopar.reports.simulation import run_data

NANO = 1e9
ROUNDING = 1e-9  # of a step: starts and ends that are the same


def step_data(run: StepRun) -> dict[str, Any]:
    """kinds: of actions. actions: of each pipeline rank, (kind, stage, microbatch,
    start, length, template). templates: (what, start within the action, length, calls,
    bytes, overlapped) of each collective. once: of each rank, what it does beside
    microbatches. messages: (kind, stage, microbatch, source, sent, target, used).
    critical: (rank, start, length, what, whether it is a message). memory: of each
    rank, (time, bytes from then on)."""
    ranks = range(len(run.memory))
    inside: dict[tuple[int, Action], list[Event]] = {}
    for e in run.events:
        if e.action is not None and e.work.stream != COMPUTE:
            inside.setdefault((e.rank, e.action), []).append(e)
    templates: dict[tuple[Any, ...], int] = {}
    actions: list[list[list[int]]] = [[] for _ in ranks]
    for e in run.events:
        computes = e.work.stream == COMPUTE
        if e.action is not None and e.action.kind.is_compute and computes:
            key = _template(e, inside.get((e.rank, e.action), []))
            number = templates.setdefault(key, len(templates))
            row = [_time(e.start), _time(e.work.seconds), number]
            actions[e.rank].append([*_action(e.action), *row])
    once: list[list[list[Any]]] = [[] for _ in ranks]
    for e in run.events:
        if e.action is None:
            w = e.work
            times = _time(e.start), _time(w.seconds)
            once[e.rank].append([w.what, w.stream, *times, w.calls, w.bytes])
    return {
        "run": run_data(run),
        "schedule": run.timeline.schedule.name,
        "stage_to_rank": list(run.timeline.schedule.stage_to_rank),
        "actions": actions,
        "templates": [list(map(list, key)) for key in templates],
        "once": once,
        "messages": [
            [*_action(m.action), m.source, _time(m.sent), m.target, _time(m.used)]
            for m in run.messages
        ],
        "critical": [*critical_path(run)],
        "memory": [
            [[_time(seconds), round(amount)] for seconds, amount in points]
            for points in run.memory
        ],
    }


def _action(action: Action) -> list[Any]:
    return [action.kind.value, action.stage, action.microbatch]


def _template(action: Event, inside: Sequence[Event]) -> tuple[Any, ...]:
    return tuple(
        (
            e.work.what,
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
        what = run.timeline.schedule.label(span.action)
        yield [rank, _time(start), _time(span.seconds), what, False]
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
    """What the rank that takes longest does before or after all microbatches."""
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
            row = [e.rank, _time(e.start), _time(e.work.seconds), e.work.what, False]
            yield row
