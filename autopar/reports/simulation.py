"""The step that a plan stands for, on paper: of a compiled program, or an estimate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.passes.price.cluster import Cluster
from autopar.passes.price.estimate import BEFORE, Estimate, schedule_of
from autopar.passes.price.stage_seconds import StageSeconds
from autopar.passes.program import Program
from autopar.passes.schedule.core_contention import ALONE, CoreContention
from autopar.passes.schedule.simulate_schedule import grid
from autopar.passes.schedule.step_run import (
    COMMUNICATION,
    COMPUTE,
    RankWork,
    StageWork,
    StepRun,
    Work,
    run_step,
)
from autopar.passes.schedule_stages import estimate_program
from autopar.reports.tables import Table
from autopar.terminal import width, wrap
from autopar.units import count, seconds

COMPUTED = ("optimizer", "once a step")  # terms that are no communication
ALIVE = ("gathered", "activations")  # terms that events make and end


def simulate_estimate(
    e: Estimate, contention: CoreContention = ALONE, layers: Sequence[str] = ()
) -> StepRun:
    """The step whose seconds the estimate states. contention: of cluster and mesh.
    layers: what is told of each stage, if not how many it has."""
    chosen = e.candidate
    named = layers or [f"{count} layers" for count in chosen.layers]
    stages = [
        StageWork(told, stage.computing, _exposed(stage), stage.send, stage.footprint)
        for stage, told in zip(e.stages, named, strict=True)
    ]
    # Nothing is sent behind the last stage.
    stages[-1] = replace(stages[-1], send=0.0)
    ranks = []
    for held, once in zip(e.memory, e.once, strict=True):
        works = [
            Work(term, s, COMPUTE if term in COMPUTED else COMMUNICATION)
            for term, s in once.items()
        ]
        ranks.append(
            RankWork(
                before=tuple(w for w in works if w.label.startswith(BEFORE)),
                after=tuple(w for w in works if not w.label.startswith(BEFORE)),
                rest=sum(n for term, n in held.items() if term not in ALIVE),
            )
        )
    return run_step(schedule_of(chosen), stages, ranks, contention, proved=True)


def _exposed(stage: StageSeconds) -> dict[str, tuple[Work, ...]]:
    """Part -> the work that it waits for."""
    exposed: dict[str, list[Work]] = defaultdict(list)
    for w in stage.exposed:
        exposed[w.part].append(Work(w.label, w.seconds, calls=w.calls, bytes=w.bytes))
    return {part: tuple(works) for part, works in exposed.items()}


def simulate_program(program: Program, cluster: Cluster) -> StepRun:
    """The step of a compiled program: computing takes what compiling found, messages
    what the cluster's links do."""
    layers = [", ".join(stage.layers) for stage in program.stages]
    e = estimate_program(program, cluster)
    return simulate_estimate(e, cluster.contention(program.mesh), layers)


# --- told ---------------------------------------------------------------------------


def run_text(run: StepRun) -> str:
    """Returns the drawn timeline, the seconds of a step's parts, and the table of
    ranks."""
    timeline = run.timeline
    legend = (
        f"schedule {timeline.schedule.name}, to scale: F forward, B backward, I and W "
        "its halves, . idle"
    )
    told = (
        f"{seconds(run.total)} a step: {seconds(run.start)} before microbatches, "
        f"{seconds(timeline.total)} with them, of which {timeline.bubble:.1%} idle, "
        f"{seconds(run.total - run.start - timeline.total)} after them"
    )
    drawn = grid(timeline, width())
    return "\n\n".join([wrap(legend), drawn, wrap(told), f"{ranks_table(run)}"])


def ranks_table(run: StepRun) -> Table:
    """Returns busy and idle seconds and peak bytes of each pipeline rank."""
    rows = [
        (
            rank,
            seconds(busy),
            seconds(idle),
            f"{idle / run.total:.1%}",
            count(peak, "B"),
        )
        for rank, (busy, idle, peak) in enumerate(
            zip(run.busy, run.idle, run.peak, strict=True)
        )
    ]
    return Table(
        "pipeline ranks",
        ("rank", "busy", "idle", "share idle", "peak memory"),
        tuple(rows),
    )


def run_data(run: StepRun) -> dict[str, Any]:
    """The same as values for JSON."""
    return {
        "seconds": run.total,
        "before": run.start,
        "pipeline": run.timeline.total,
        "bubble": run.timeline.bubble,
        "busy": list(run.busy),
        "idle": list(run.idle),
        "peak": list(run.peak),
        "in_flight": list(run.timeline.in_flight),
    }
