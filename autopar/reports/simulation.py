"""The step that a plan stands for, on paper: of a compiled program, or an estimate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from autopar.passes.mesh import Mesh
from autopar.passes.price.cluster import Cluster, Device
from autopar.passes.price.estimate import (
    BEFORE,
    OPTIMIZER_TRAFFIC,
    Estimate,
    schedule_of,
)
from autopar.passes.price.measured import between
from autopar.passes.price.stage_seconds import StageSeconds, exposed
from autopar.passes.program import ParameterSpec, Program
from autopar.passes.schedule.core_contention import ALONE, CoreContention
from autopar.passes.schedule.footprint import Communication, peak_bytes
from autopar.passes.schedule.simulate_schedule import grid
from autopar.passes.schedule.step_run import (
    BACKWARD,
    COMMUNICATION,
    COMPUTE,
    FORWARD,
    WEIGHT,
    RankWork,
    StageWork,
    StepRun,
    Work,
    run_step,
)
from autopar.reports.inspection import messages_of_a_step
from autopar.reports.tables import Table
from autopar.runtime.parameters.shards import local_shape
from autopar.terminal import width, wrap
from autopar.units import count, seconds

# --- an estimate ---------------------------------------------------------------------

COMPUTED = ("optimizer", "once a step")  # terms that are no communication


def simulate_estimate(e: Estimate, contention: CoreContention = ALONE) -> StepRun:
    """The step whose seconds the estimate states. contention: of cluster and mesh."""
    chosen = e.candidate
    stages = [
        _estimated_stage(stage, f"{layers} layers")
        for stage, layers in zip(e.stages, chosen.layers, strict=True)
    ]
    ranks = []
    for held, once, cast in zip(e.memory, e.once, shared_casts(e), strict=True):
        works = [
            Work(term, s, COMPUTE if term in COMPUTED else COMMUNICATION)
            for term, s in once.items()
        ]
        ranks.append(
            RankWork(
                before=tuple(w for w in works if w.what.startswith(BEFORE)),
                after=tuple(w for w in works if not w.what.startswith(BEFORE)),
                rest=sum(n for t, n in held.items() if t != "activations") - cast,
            )
        )
    return run_step(schedule_of(chosen), stages, ranks, contention)


def shared_casts(e: Estimate) -> list[float]:
    """Bytes of each pipeline rank that footprints have for a step, but the estimate has
    not: parameters in another precision, of which ZeRO casts the rank's share alone."""
    schedule, footprints = schedule_of(e.candidate), [s.footprint for s in e.stages]
    return [
        peak_bytes(schedule, rank, footprints) - held["activations"]
        for rank, held in enumerate(e.memory)
    ]


def _estimated_stage(stage: StageSeconds, layers: str) -> StageWork:
    waits: dict[str, list[Work]] = defaultdict(list)
    for (part, kind, *axes), waited in stage.exposed.items():
        waits[part].append(Work(f"{kind} {','.join(axes)}", waited))
    whole = {FORWARD: stage.forward, BACKWARD: stage.backward, WEIGHT: stage.weight}
    return StageWork(
        layers,
        {p: s - sum(w.seconds for w in waits[p]) for p, s in whole.items()},
        {part: tuple(found) for part, found in waits.items()},
        stage.send,
        stage.footprint,
    )


# --- a program -----------------------------------------------------------------------


def simulate_program(program: Program, cluster: Cluster) -> StepRun:
    """The step of a compiled program: computing takes what compiling found, messages
    what the cluster's links do."""
    messages = messages_of_a_step(program)
    stages = [
        _compiled_stage(program, i, messages, cluster)
        for i in range(len(program.stages))
    ]
    ranks = [
        _compiled_rank(program, rank, messages, cluster)
        for rank in range(len(program.schedule.ranks))
    ]
    contention = cluster.contention(program.mesh)
    return run_step(program.schedule, stages, ranks, contention)


def _compiled_stage(
    program: Program, index: int, messages: list[Communication], cluster: Cluster
) -> StageWork:
    spec, m = program.stages[index], program.plan.microbatches
    waits: dict[str, list[Work]] = defaultdict(list)
    send = 0.0
    for c in messages:
        if c.stage != index or c.part == "step":
            continue
        work = _message(program, c, cluster, m)
        if c.kind == "send":
            send = max(send, work.seconds)  # forth or back
        else:
            waits[c.part].append(work)
    # At least as much as makes a drawing possible.
    whole, waited = spec.seconds, spec.exposed
    computing = {
        FORWARD: max(whole.forward - waited.forward, 1e-9),
        BACKWARD: max(whole.input_half - waited.input_half, 1e-9),
        WEIGHT: max(whole.weight_half - waited.weight_half, 0.0),
    }
    found = {part: tuple(works) for part, works in waits.items()}
    layers = ", ".join(spec.layers)
    return StageWork(layers, computing, found, send, spec.footprint)


def _message(program: Program, c: Communication, cluster: Cluster, times: int) -> Work:
    """Prices one microbatch's message, of `times` in a step; c: of all of them."""
    link = cluster.link(program.mesh, c.axes)
    calls, given = c.calls / times, c.bytes / times
    whole = given * (link.ranks if c.kind == "all_gather" else 1)
    kind = "send" if c.kind == "shift" else c.kind  # to the next rank of a ring
    plan = program.plan
    shared = plan.zero > 1 and set(c.axes) <= set(plan.parameter_axes)
    return Work(
        f"{c.kind} {','.join(c.axes)}",
        calls * link.seconds(kind, whole / calls) if calls else 0.0,
        overlapped=shared and c.part != "step",
        calls=calls,
        bytes=given,
    )


def _compiled_rank(
    program: Program, rank: int, messages: list[Communication], cluster: Cluster
) -> RankWork:
    own = [i for i, r in enumerate(program.schedule.stage_to_rank) if r == rank]
    before, after = list[Work](), list[Work]()
    for stage in own:
        once = [c for c in messages if c.stage == stage and c.part == "step"]
        gathers = [c for c in once if c.kind == "all_gather"]
        seconds, halves = (
            program.stages[stage].seconds,
            program.schedule.splits_backward,
        )
        before += _beside(program, stage, gathers, seconds.forward, cluster)
        leaving = [c for c in once if c not in gathers and "pp" not in c.axes]
        backward = seconds.weight_half + (0 if halves else seconds.input_half)
        after += _beside(program, stage, leaving, backward, cluster)
        tied = [c for c in once if c not in gathers and "pp" in c.axes]
        after += [_message(program, c, cluster, 1) for c in tied]
    held = program.memory[rank]
    after.append(Work("optimizer", _update(program, rank, cluster.device), COMPUTE))
    rest = held.total - held.activations
    return RankWork(tuple(before), tuple(after), rest)


def _beside(
    program: Program,
    stage: int,
    messages: list[Communication],
    computing: float,
    cluster: Cluster,
) -> list[Work]:
    """What a rank waits for of messages by block, while a stage computes so long."""
    works = [_message(program, c, cluster, 1) for c in messages]
    moving = sum(w.seconds for w in works)
    if not moving:
        return works
    blocks = max(1, len(program.stages[stage].layers))
    waited = exposed(moving, computing, blocks, cluster)
    return [replace(w, seconds=w.seconds * waited / moving) for w in works]


def _update(program: Program, rank: int, device: Device) -> float:
    """Seconds of the optimizer on a pipeline rank."""
    points = device.ops.update
    if not points:
        speed = device.bytes_per_second * device.bandwidth_efficiency
        return OPTIMIZER_TRAFFIC * program.memory[rank].gradients / speed
    coords = {a: rank if a == "pp" else 0 for a, _ in program.mesh.axes}
    stages = program.schedule.stage_to_rank
    return sum(
        between(points, size)[0]
        for spec in program.parameters.values()
        if spec.trainable and any(stages[s] == rank for s in spec.stages)
        if (size := _bytes(spec, program.mesh, coords))
    )


def _bytes(spec: ParameterSpec, mesh: Mesh, coords: Mapping[str, int]) -> int:
    """Counts the bytes that a rank keeps of a parameter."""
    itemsize: int = getattr(torch, spec.dtype).itemsize
    return itemsize * prod(local_shape(spec, mesh, coords))


# --- told ---------------------------------------------------------------------------


def run_text(run: StepRun) -> str:
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
