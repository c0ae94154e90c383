"""What a program is: its named dims, stages, communication and schedule, as tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from textwrap import fill
from typing import Any

import torch

from autopar.emitted import Message, Messages, collectives_in, read_module, users_of
from autopar.shards import local_shape
from autopar.tables import Table, count, ranges, seconds, size
from passes.cost import BACKWARD
from passes.graph import DTYPES
from passes.program import ParameterSpec, Program
from passes.simulate_schedule import Timeline, grid, simulate

LAYER = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.|$)")  # the number in `h.3.attn`
UNNAMED = re.compile(r"d\d+")
# Which functions of a module run once a step, and which for each microbatch.
ONCE, EACH = ("prologue",), ("forward", "backward")


# --- named dims --------------------------------------------------------------------


def pattern(spec: ParameterSpec) -> str:
    """`embed (3 heads/tp head_dim)`: a dim without a name shows its extent."""
    parts = []
    for sizes, names, slots in zip(spec.factors, spec.dims, spec.slots, strict=True):
        factors = [
            "/".join((str(n) if UNNAMED.fullmatch(name) else name, *axes))
            for n, name, axes in zip(sizes, names, slots, strict=True)
        ]
        text = " ".join(factors) or "1"
        parts.append(text if len(factors) == 1 else f"({text})")
    return " ".join(parts)


def parameter_table(program: Program, every: bool = False) -> Table:
    """Each parameter: its named dims and where it rests; equal layers in one row.

    every: one row for each parameter instead.
    """
    rows: dict[tuple[str, ...], tuple[list[int], set[int]]] = {}
    for name, spec in program.parameters.items():
        template = name if every else LAYER.sub("*", name, count=1)
        shape = "x".join(map(str, spec.shape))
        pending = " ".join(f"+{a}" for a in spec.pending)
        key = (template, shape, pattern(spec), pending)
        layers, stages = rows.setdefault(key, ([], set()))
        found = None if every else LAYER.search(name)
        layers.extend([int(found[1])] if found else [])
        stages.update(spec.stages)
    table = tuple(
        (template.replace("*", ranges(layers), 1) if layers else template, *rest,
         ranges(list(stages)))
        for (template, *rest), (layers, stages) in rows.items()
    )  # fmt: skip
    notes = [f"tied: {alias} is {name}" for alias, name in program.aliases.items()]
    return Table(
        "named dims (dim/axis: split on that axis; +axis: gradient summed over it "
        "once a step)",
        ("parameter", "shape", "named dims", "gradient", "stage"),
        table,
        (*notes, *program.notes),
    )


# --- stages ------------------------------------------------------------------------


def stage_table(program: Program) -> Table:
    """Each stage: its layers, and what a rank of it holds, computes and sends."""
    rows = []
    for index, stage in enumerate(program.stages):
        rank = _first_rank(program, index)
        module = read_module(program.modules[program.module_of(rank, index)])
        held, held_bytes = _held(program, index, rank)
        messages = [f"{_type(m)} {size(_bytes((m,)))}" for m in module.sends]
        rows.append(
            (
                index,
                fill(_layers(program, index), 30),
                count(held),
                size(held_bytes),
                count(module.flops),
                "\n".join(messages),
                seconds(stage.seconds),
            )
        )
    estimated = [stage.seconds for stage in program.stages]
    uneven = (
        max(estimated) * len(estimated) / sum(estimated) - 1 if any(estimated) else 0
    )
    return Table(
        f"stages: mesh {str(program.mesh) or 'of one rank'}, "
        f"{program.plan.microbatches} microbatches (numbers per rank and microbatch)",
        ("stage", "layers", "params", "bytes", "FLOPs", "sends", "time"),
        tuple(rows),
        (
            "FLOPs: of the forward. time: estimated, forward and backward; the slowest "
            f"stage is {uneven:.1%} above the average",
        ),
    )


def _first_rank(program: Program, stage: int) -> int:
    return min(min(ranks) for ranks in users_of(program, stage).values())


def _held(program: Program, stage: int, rank: int) -> tuple[int, int]:
    """Number and bytes of the parameters that the rank holds for the stage."""
    coords, number, total = program.mesh.coords(rank), 0, 0
    for spec in program.parameters.values():
        if stage in spec.stages:
            here = prod(local_shape(spec, program.mesh, coords))
            number += here
            total += here * _itemsize(spec.dtype)
    return number, total


def _layers(program: Program, stage: int) -> str:
    """`tokens, positions, blocks.0-3`: the modules whose parameters a stage holds."""
    alias_of = {name: alias for alias, name in program.aliases.items()}
    names = [n for n in program.stages[stage].names.values() if n in program.parameters]
    tied = [n for n in names if program.parameters[n].stages[0] != stage]
    names = [n for n in names if n not in tied] + [alias_of.get(n, n) for n in tied]
    modules: dict[str, list[int]] = {}
    for name in names:
        found = LAYER.search(name)
        module = name[: found.start() - 1] if found else name.rpartition(".")[0]
        layers = modules.setdefault(module.rpartition(".")[2], [])
        layers.extend([int(found[1])] if found else [])
    return ", ".join(f"{m}.{ranges(ns)}" if ns else m for m, ns in modules.items())


def _itemsize(dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize


def _type(message: Message) -> str:
    shape, dtype = message
    short = DTYPES.get(getattr(torch, dtype), dtype)
    return f"{short}[{','.join(map(str, shape))}]"


def _bytes(messages: Messages) -> int:
    return sum(prod(shape) * _itemsize(dtype) for shape, dtype in messages)


# --- communication -------------------------------------------------------------------


def communication_table(program: Program) -> Table:
    """How often a rank of each stage communicates in a step, by kind and axes."""
    rows: list[tuple[Any, ...]] = []
    for stage in range(len(program.stages)):
        text = program.modules[program.module_of(_first_rank(program, stage), stage)]
        rows += [(stage, *row) for row in _in_module(text, program.plan.microbatches)]
        rows += [(stage, *row) for row in _at_the_end(program, stage)]
    return Table(
        "communication of one rank in one step",
        ("stage", "when", "kind", "axes", "times", "bytes"),
        tuple(rows),
        () if rows else ("none",),
    )


def _in_module(text: str, microbatches: int) -> Iterator[tuple[Any, ...]]:
    module = read_module(text)
    for (function, kind, axes), calls in sorted(collectives_in(text).items()):
        if function in EACH:
            yield function, kind, " ".join(axes), calls * microbatches, ""
        elif function in ONCE:
            yield "start", kind, " ".join(axes), calls, ""
    for function, messages in (
        ("forward", module.sends),
        ("backward", module.d_receives),
    ):
        if messages:
            times = len(messages) * microbatches
            yield function, "send", "pp", times, size(_bytes(messages) * microbatches)


def _at_the_end(program: Program, stage: int) -> Iterator[tuple[Any, ...]]:
    """The reductions of gradients: one for each set of axes and dtype."""
    coords = program.mesh.coords(_first_rank(program, stage))
    total: Counter[tuple[str, ...]] = Counter()
    dtypes: dict[tuple[str, ...], set[str]] = {}
    for spec in program.parameters.values():
        held_by = {program.schedule.stage_to_rank[s] for s in spec.stages}
        axes = (*spec.pending, "pp") if len(held_by) > 1 else spec.pending
        if spec.trainable and stage in spec.stages and axes:
            elements = prod(local_shape(spec, program.mesh, coords))
            total[axes] += elements * _itemsize(spec.dtype)
            dtypes.setdefault(axes, set()).add(spec.dtype)
    for axes, n in sorted(total.items()):
        yield "end", "all_reduce", " ".join(axes), len(dtypes[axes]), size(n)


# --- schedule ------------------------------------------------------------------------


def timeline(program: Program) -> Timeline:
    """The schedule run on paper, with the estimated seconds of the stages."""
    estimated = [max(stage.seconds, 1e-9) for stage in program.stages]
    forward = [t / (1 + BACKWARD) for t in estimated]
    backward = [t - f for t, f in zip(estimated, forward, strict=True)]
    return simulate(program.schedule, forward, backward)


def schedule_text(program: Program) -> str:
    """The grid of the schedule, its bubble, and the microbatches in flight."""
    expected = timeline(program)
    flight = " ".join(map(str, expected.in_flight))
    return (
        f"schedule {program.schedule.name}: F forward, B backward, . idle "
        f"(a backward drawn as two forwards)\n\n{grid(program.schedule)}\n"
        f"estimated {seconds(expected.total)} a step, bubble {expected.bubble:.1%}, "
        f"most microbatches in flight by rank: {flight}"
    )


# --- all of it -----------------------------------------------------------------------


def report(program: Program, every: bool = False) -> str:
    tables = (parameter_table(program, every), stage_table(program))
    parts = [
        *map(str, tables),
        schedule_text(program),
        str(communication_table(program)),
    ]
    return "\n\n".join(parts)


def report_data(program: Program, every: bool = True) -> dict[str, Any]:
    """The same as values for JSON, not rounded where a table rounds."""
    expected = timeline(program)
    return {
        "mesh": str(program.mesh),
        "microbatches": program.plan.microbatches,
        "parameters": parameter_table(program, every).data(),
        "aliases": dict(program.aliases),
        "stages": [_stage_data(program, i) for i in range(len(program.stages))],
        "communication": communication_table(program).data(),
        "schedule": {
            "name": program.schedule.name,
            "seconds": expected.total,
            "bubble": expected.bubble,
            "in_flight": list(expected.in_flight),
        },
        "notes": list(program.notes),
    }


def _stage_data(program: Program, index: int) -> Mapping[str, Any]:
    rank = _first_rank(program, index)
    key = program.module_of(rank, index)
    module = read_module(program.modules[key])
    held, held_bytes = _held(program, index, rank)
    return {
        "stage": index,
        "layers": _layers(program, index),
        "modules": sorted(set(program.stages[index].modules.values())),
        "parameters_per_rank": held,
        "parameter_bytes_per_rank": held_bytes,
        "forward_flops": module.flops,
        "sends": [{"shape": s, "dtype": d} for s, d in module.sends],
        "send_bytes": _bytes(module.sends),
        "seconds": program.stages[index].seconds,
    }
