"""A simulated step as Chrome's trace events, which Perfetto and chrome://tracing open.

Trace Event Format: one process for each pipeline rank, one thread for each stream,
microseconds; arrows for messages, and a counter for memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.passes.errors import AutoparError
from autopar.passes.schedule.step_run import COMMUNICATION, COMPUTE, Event, StepRun

STREAMS = [COMPUTE, COMMUNICATION]
MICRO, NANO = 1e6, 1e9
# An arrow belongs to the event that it starts within: it leaves just before its end.
WITHIN = 1e-3


def write_trace(run: StepRun, path: Path) -> None:
    """Writes a Chrome trace (JSON, for Perfetto). Raises AutoparError if it cannot."""
    try:
        path.write_text(json.dumps(trace_data(run)) + "\n", encoding="utf-8")
    except OSError as error:
        raise AutoparError(f"cannot write '{path}': {error.strerror}") from None


def trace_data(run: StepRun) -> dict[str, Any]:
    """Returns the step in Chrome's trace event format: slices, arrows, memory
    counters."""
    events: list[dict[str, Any]] = []
    for rank in range(len(run.memory)):
        events.append(
            _about(_thread(run, rank), "process_name", f"pipeline rank {rank}")
        )
        for stream in STREAMS:
            events.append(_about(_thread(run, rank, stream), "thread_name", stream))
            events += _slices(run, rank, stream)
    events += _arrows(run)
    for rank, points in enumerate(run.memory):
        for seconds, amount in points:
            counter = {"ph": "C", "name": "memory", "pid": rank, "ts": seconds * MICRO}
            events.append({**counter, "args": {"bytes": round(amount)}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _thread(run: StepRun, rank: int, stream: str = COMPUTE) -> dict[str, int]:
    """The thread of an event. Perfetto takes threads of one number for one thread, in
    whatever process, and one with its process's number for the main thread."""
    before = len(run.memory) + len(STREAMS) * rank
    return {"pid": rank, "tid": before + STREAMS.index(stream)}


def _about(thread: dict[str, int], event: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": event, **thread, "args": {"name": name}}


def _slices(run: StepRun, rank: int, stream: str) -> Iterator[dict[str, Any]]:
    """What takes time on a stream, one after the other.

    In whole nanoseconds, as Perfetto counts: it drops what begins a rounding error
    before the end of what came before.
    """
    events = [e for e in run.events if (e.rank, e.work.stream) == (rank, stream)]
    events = sorted((e for e in events if e.work.seconds > 0), key=lambda e: e.start)
    starts = [round(e.start * NANO) for e in events]
    ends = [round((e.start + e.work.seconds) * NANO) for e in events]
    for event, start, end, following in zip(
        events, starts, ends, [*starts[1:], *ends[-1:]], strict=True
    ):
        yield {
            "ph": "X",
            "name": event.work.label,
            "cat": stream,
            **_thread(run, rank, stream),
            "ts": start * MICRO / NANO,
            "dur": (min(end, following) - start) * MICRO / NANO,
            "args": _details(event),
        }


def _details(event: Event) -> dict[str, Any]:
    work, args = event.work, {}
    if event.action is not None:
        args = {
            "microbatch": event.action.microbatch,
            "stage": event.action.stage,
            "layers": event.layers,
        }
    args["seconds"] = work.seconds
    return args | {
        k: v for k in ("calls", "bytes") if (v := getattr(work, k)) is not None
    }


def _arrows(run: StepRun) -> list[dict[str, Any]]:
    """Arrows from the action that makes a message to the one that uses it."""
    lasts = {
        (e.rank, e.action): e.work.seconds
        for e in run.events
        if e.work.stream == COMPUTE and e.action is not None
    }
    shortest = min(lasts.values(), default=0.0)
    arrows = []
    for number, m in enumerate(run.messages):
        both = {"cat": "message", "name": str(m.action), "id": number}
        sent = max(0.0, m.sent - WITHIN * shortest) * MICRO
        used = (m.used + WITHIN * shortest) * MICRO
        arrows.append({"ph": "s", **both, **_thread(run, m.source), "ts": sent})
        arrows.append(
            {"ph": "f", "bp": "e", **both, **_thread(run, m.target), "ts": used}
        )
    return arrows
