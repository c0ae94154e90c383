"""A simulated step as Chrome's trace events, which Perfetto and chrome://tracing open.

Trace Event Format: one process for each pipeline rank, one thread for each stream,
microseconds; arrows for messages, and a counter for memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from passes.errors import AutoparError
from passes.schedule.step_run import COMMUNICATION, COMPUTE, Event, StepRun

STREAMS = {COMPUTE: 0, COMMUNICATION: 1}
MICRO = 1e6
# An arrow belongs to the event that it starts within: it leaves just before its end.
WITHIN = 1e-3


def write_trace(run: StepRun, path: Path) -> None:
    try:
        path.write_text(json.dumps(trace_data(run)) + "\n", encoding="utf-8")
    except OSError as error:
        raise AutoparError(f"cannot write '{path}': {error.strerror}") from None


def trace_data(run: StepRun) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for rank in range(len(run.memory)):
        found.append(_name("process_name", rank, 0, f"pipeline rank {rank}"))
        for stream, thread in STREAMS.items():
            found.append(_name("thread_name", rank, thread, stream))
    found += [_event(event) for event in run.events if event.work.seconds > 0]
    found += _arrows(run)
    for rank, points in enumerate(run.memory):
        for seconds, amount in points:
            counter = {"ph": "C", "name": "memory", "pid": rank, "ts": seconds * MICRO}
            found.append({**counter, "args": {"bytes": round(amount)}})
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _event(event: Event) -> dict[str, Any]:
    work, args = event.work, {}
    if event.action is not None:
        args = {
            "microbatch": event.action.microbatch,
            "stage": event.action.stage,
            "layers": event.layers,
        }
    args["seconds"] = work.seconds
    args |= {k: v for k in ("calls", "bytes") if (v := getattr(work, k)) is not None}
    return {
        "ph": "X",
        "name": work.what,
        "cat": work.stream,
        "pid": event.rank,
        "tid": STREAMS[work.stream],
        "ts": event.start * MICRO,
        "dur": work.seconds * MICRO,
        "args": args,
    }


def _arrows(run: StepRun) -> list[dict[str, Any]]:
    """From the action that makes a message to the one that uses it."""
    lasts = {
        (e.rank, e.action): e.work.seconds
        for e in run.events
        if e.work.stream == COMPUTE and e.action is not None
    }
    shortest = min(lasts.values(), default=0.0)
    found = []
    for number, m in enumerate(run.messages):
        both = {"cat": "message", "name": str(m.action), "id": number, "tid": 0}
        sent = max(0.0, m.sent - WITHIN * shortest) * MICRO
        used = (m.used + WITHIN * shortest) * MICRO
        found.append({"ph": "s", **both, "pid": m.source, "ts": sent})
        found.append({"ph": "f", "bp": "e", **both, "pid": m.target, "ts": used})
    return found
