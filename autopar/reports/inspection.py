"""A program as tables: its named dims, stages, communication and schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from math import prod
from textwrap import fill
from typing import Any

import torch

from autopar.machine.measured_cluster import how_priced, known_cluster
from autopar.passes.capture.mixed_precision import Stream
from autopar.passes.graph import LAYER
from autopar.passes.graph_text import DTYPES
from autopar.passes.mesh import PIPELINE
from autopar.passes.price.cluster import Cluster
from autopar.passes.program import ParameterSpec, Program, dtype_name
from autopar.passes.schedule.check_schedule import peak_in_flight
from autopar.passes.schedule.footprint import COMMUNICATION_PARTS, Communication
from autopar.passes.schedule.simulate_schedule import grid
from autopar.passes.schedule_stages import estimate_program
from autopar.reports.memory_table import memory_table
from autopar.reports.op_sharding_table import op_sharding_table
from autopar.reports.parameters import parameter_table, update_table
from autopar.reports.sharing import share_table, shares
from autopar.reports.simulation import simulate_estimate, simulate_program
from autopar.reports.tables import Table, ranges
from autopar.runtime.execute.emitted import Message, Messages, sends_of
from autopar.runtime.parameters.shards import local_shape
from autopar.terminal import width, wrap
from autopar.units import count, seconds, size

LEGEND = "F forward, B backward (drawn as two forwards), . idle"


# What runs functions, by the plan's choice.
BACKEND = {
    "auto": "functions run as Python or compiled, as the device was measured",
    "eager": "functions run as the modules have them, as Python",
    "inductor": "functions run as code that Inductor makes of them on the device",
}


# --- stages ------------------------------------------------------------------------


def stage_table(program: Program) -> Table:
    """Shows each stage's layers, and what a rank of it holds, computes and sends."""
    rows = []
    for index, stage in enumerate(program.stages):
        held, held_bytes = _held(program, index)
        rows.append(
            (
                index,
                fill(_layers(program, index), 24),
                count(held),
                size(held_bytes),
                size(_activations(program, index)),
                count(stage.flops),
                "\n".join(map(_type, _sends(program, index))),
                seconds(stage.took.total),
            )
        )
    estimated = [stage.took.total for stage in program.stages]
    average = sum(estimated) / len(estimated)
    uneven = max(estimated) / average - 1 if average else 0.0
    return Table(
        f"stages: mesh {str(program.mesh) or 'of one rank'}, microbatches "
        f"{program.plan.microbatches}, recompute {program.plan.recompute}"
        f"{_layout(program)}"
        f"{', optimizer on the CPU' if program.plan.offload else ''}; "
        "numbers are those of one rank",
        ("stage", "layers", "params", "bytes", "activations", "FLOPs", "sends", "time"),
        tuple(rows),
        (
            "activations: the most at once, of all microbatches in flight, and what is "
            "gathered for them. FLOPs: one microbatch's forward.",
            "time: estimated, one microbatch forward and backward; the slowest stage "
            f"is {uneven:.1%} above the average.",
            *_precision(program),
            *_chunks(program),
            f"backend {program.plan.backend}: {BACKEND[program.plan.backend]}.",
        ),
    )


def _layout(program: Program) -> str:
    """How rows lie, if not one after the other."""
    axes = program.plan.zigzag
    return f", rows of {' and '.join(axes)} in zigzag" if axes else ""


def _chunks(program: Program) -> tuple[str, ...]:
    """Tells by how many chunks the loss is computed, if by several."""
    chunks = program.plan.loss_chunks
    told = f"loss_chunks: logits are there for one of {chunks} chunks of positions."
    return (told,) if chunks > 1 else ()


def _precision(program: Program) -> tuple[str, ...]:
    tf32 = ("tf32: GPUs multiply float32 in TF32.",) if program.plan.tf32 else ()
    low = program.plan.dtype
    if low is None:
        return tf32
    scaled = ", the loss scaled" if program.plan.scales_loss else ""
    whole = isinstance(program.plan.lowering, Stream)
    return (
        *tf32,
        f"precision {program.plan.precision}: {'ops' if whole else 'products'} compute "
        f"in {dtype_name(low)}"
        f"{scaled}; parameters and their gradients stay as they are.",
    )


def _activations(program: Program, stage: int) -> int:
    """Bytes kept for the backwards of microbatches in flight, and of the one that runs.

    A rank's stages need not be at their most at the same time: their sum is a bound.
    """
    rank = program.schedule.stage_to_rank[stage]
    own = [a for a in program.schedule.ranks[rank] if a.stage == stage]
    return program.stages[stage].footprint.peak(peak_in_flight(own))


def _sends(program: Program, stage: int) -> Messages:
    text = program.modules[program.module_of(first_rank(program, stage), stage)]
    return sends_of(text)


def first_rank(program: Program, stage: int) -> int:
    """Returns the stage's rank at coordinate 0 of every axis but the pipeline's."""
    place = program.schedule.stage_to_rank[stage]
    coords = {axis: place if axis == PIPELINE else 0 for axis, _ in program.mesh.axes}
    return program.mesh.rank(coords)


def _held(program: Program, stage: int) -> tuple[int, int]:
    """Number and bytes of the parameters that the stage's first rank holds for it."""
    coords = program.mesh.coords(first_rank(program, stage))
    number, total = 0, 0
    for spec in program.tensors.values():
        if stage in spec.stages:
            here = prod(local_shape(spec, program.mesh, coords))
            number += here
            total += here * _itemsize(spec.dtype)
    return number, total


def _layers(program: Program, stage: int) -> str:
    """`tokens, positions, blocks.0-3`: the modules whose parameters a stage holds."""
    alias_of = {name: alias for alias, name in program.aliases.items()}
    names = [n for n in program.stages[stage].names.values() if n in program.tensors]
    tied = [n for n in names if program.tensors[n].stages[0] != stage]
    names = [n for n in names if n not in tied] + [alias_of.get(n, n) for n in tied]
    modules: dict[str, list[int]] = {}
    for name in names:
        layer = LAYER.search(name)
        module = name[: layer.start() - 1] if layer else name.rpartition(".")[0]
        layers = modules.setdefault(module.rpartition(".")[2], [])
        layers.extend([int(layer[1])] if layer else [])
    return ", ".join(f"{m}.{ranges(ns)}" if ns else m for m, ns in modules.items())


def _itemsize(dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize


def _type(message: Message) -> str:
    shape, dtype = message
    return f"{_short(dtype)}[{','.join(map(str, shape))}]"


def _short(dtype: str) -> str:
    """`f32` of `float32`."""
    return DTYPES.get(getattr(torch, dtype), dtype)


# --- communication -------------------------------------------------------------------


def communication_table(program: Program) -> Table:
    """How often a rank of each stage communicates in a step, by kind and axes."""
    rows = [
        (c.stage, c.part, c.kind, " ".join(c.axes), c.dtype, c.calls, size(c.bytes))
        for c in messages_of_a_step(program)
    ]
    return Table(
        "communication in one step, of one rank of each stage",
        ("stage", "part", "kind", "axes", "dtype", "calls", "bytes"),
        tuple(rows),
        () if rows else ("none",),
    )


def messages_of_a_step(program: Program) -> list[Communication]:
    """The calls and bytes of each stage in a step, all microbatches together."""
    times = {
        "forward": program.plan.microbatches,
        "backward": program.plan.microbatches,
    }
    messages = [
        replace(
            c,
            calls=c.calls * times.get(c.part, 1),
            bytes=c.bytes * times.get(c.part, 1),
        )
        for c in program.communication
    ]
    for stage in range(len(program.stages)):
        messages += _reductions(program, stage)
    return sorted(
        messages,
        key=lambda c: (c.stage, COMMUNICATION_PARTS.index(c.part), c.axes, c.kind),
    )


def _reductions(program: Program, stage: int) -> list[Communication]:
    """Lists gradients' reductions after a step: one for each set of axes and dtype."""
    coords = program.mesh.coords(first_rank(program, stage))
    total: Counter[tuple[tuple[str, ...], str]] = Counter()
    for spec in program.tensors.values():
        axes, _ = program.gradient_axes(spec)
        if spec.trainable and stage in spec.stages and axes:
            elements = prod(local_shape(spec, program.mesh, coords))
            total[axes, spec.dtype] += elements * _itemsize(spec.dtype)
    return [
        Communication(stage, "step", "all_reduce", axes, _short(dtype), 1, n)
        for (axes, dtype), n in total.items()
    ]


# --- schedule ------------------------------------------------------------------------


def devices_of(program: Program, cluster: Cluster | None = None) -> Cluster:
    """The cluster whose links carry messages: the plan's own, else this machine's."""
    return cluster or known_cluster(program.mesh.size)


def schedule_text(program: Program, cluster: Cluster | None = None) -> str:
    """The grid of the schedule, the step on paper, and the microbatches in flight.
    cluster: by whose prices it was compiled; None: this machine's."""
    schedule, devices = program.schedule, devices_of(program, cluster)
    e = estimate_program(program, devices)
    run = simulate_estimate(e, devices.contention(program.mesh))
    flight = " ".join(map(str, run.timeline.in_flight))
    asked = program.plan.schedule
    name = schedule.name if schedule.name == asked else f"{asked} ({schedule.name})"
    lines = [f"schedule {name}: {LEGEND}"]
    counted = "microbatches"
    if program.plan.stages_per_rank > 1:
        lines.append("before the letter is the stage, after it the microbatch")
        counted = "(stage, microbatch) pairs"
    taken = f"{program.mesh.size} of " * (devices.devices > program.mesh.size)
    told = (
        f"estimated {seconds(run.total)} a step on {taken}{devices}, bubble "
        f"{run.timeline.bubble:.1%}, most {counted} in flight by rank: {flight}",
        how_priced(e, devices),
    )
    drawn = [*map(wrap, lines), "", grid(schedule, width()), *map(wrap, told)]
    return "\n".join(drawn)


# --- all of it -----------------------------------------------------------------------


def report(
    program: Program, every: bool = False, cluster: Cluster | None = None
) -> str:
    """cluster: see `schedule_text`."""
    tables = (parameter_table(program, every), stage_table(program))
    parts = [
        *map(str, tables),
        *([str(update_table(program))] if program.updates else ()),
        *([str(share_table(program))] if program.plan.zero else ()),
        str(memory_table(program)),
        *([str(op_sharding_table(program.plan))] if program.plan.op_shardings else ()),
        schedule_text(program, cluster),
        str(communication_table(program)),
        proof_text(program),
    ]
    return "\n\n".join(parts)


def proof_text(program: Program) -> str:
    """How a program was proved, and which parts were not run at full size."""
    if program.proof is None:
        return "not proved"
    return "\n".join([str(program.proof), *map(str, program.proof.cut_short)])


def report_data(program: Program, cluster: Cluster | None = None) -> dict[str, Any]:
    """The same as values for JSON, not rounded where a table rounds."""
    run = simulate_program(program, devices_of(program, cluster))
    return {
        "mesh": str(program.mesh),
        "microbatches": program.plan.microbatches,
        "zero": program.plan.zero,
        "zigzag": list(program.plan.zigzag),
        "offload": program.plan.offload,
        "backend": program.plan.backend,
        "op_shardings": {a: dict(own) for a, own in program.plan.op_shardings.items()},
        "shares": [asdict(share) for share in shares(program)],
        "loss_chunks": program.plan.loss_chunks,
        "precision": program.plan.precision,
        "tf32": program.plan.tf32,
        "parameters": [_parameter_data(n, p) for n, p in program.tensors.items()],
        "aliases": dict(program.aliases),
        "updates": {k: str(v).split("\n") for k, v in program.updates.items()},
        "stages": [_stage_data(program, i) for i in range(len(program.stages))],
        "memory": [asdict(m) for m in program.memory],
        "recompute_layers": dict(program.plan.recompute_layers),
        "communication": [asdict(c) for c in messages_of_a_step(program)],
        "schedule": {
            "name": program.schedule.name,
            "seconds": run.total,
            "bubble": run.timeline.bubble,
            "in_flight": list(run.timeline.in_flight),
        },
        "remarks": list(program.remarks),
        "proof": program.proof.to_data() if program.proof else None,
    }


def _parameter_data(name: str, spec: ParameterSpec) -> Mapping[str, Any]:
    return {
        "parameter": name,
        "shape": list(spec.shape),
        "dims": spec.pattern,
        "pending": list(spec.pending),
        "gathered": list(spec.gathered),
        "stages": list(spec.stages),
    }


def _stage_data(program: Program, index: int) -> Mapping[str, Any]:
    stage = program.stages[index]
    held, held_bytes = _held(program, index)
    sends = _sends(program, index)
    return {
        "stage": index,
        "layers": _layers(program, index),
        "modules": sorted(set(stage.modules.values())),
        "parameters": held,
        "parameter_bytes": held_bytes,
        "activation_bytes": _activations(program, index),
        "forward_flops": stage.flops,
        "sends": [{"shape": s, "dtype": d} for s, d in sends],
        "seconds": stage.took.total,
    }
