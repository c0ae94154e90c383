"""The whole way from a captured model to a program, pass by pass."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from math import gcd
from typing import Protocol

from passes.capture.lower_precision import lower_precision
from passes.capture.normalize import normalize
from passes.capture.trace import Traced
from passes.cost import Costs
from passes.dims.name_dims import Named, name_dims
from passes.errors import BatchError, CaptureError
from passes.graph import Value
from passes.mesh import TIME
from passes.plan import Plan
from passes.program import (
    ParameterSpec,
    Program,
    StageSpec,
    coords_text,
    dtype_name,
)
from passes.proof.input_ranges import find_input_ranges
from passes.schedule.choose_recompute import (
    choose_recompute,
    recompute_seconds,
    stage_policies,
)
from passes.schedule.choose_schedule import (
    activation_budget,
    choose_schedule,
    splits_backward,
)
from passes.schedule.footprint import communication, footprint
from passes.schedule.memory import check_memory, rank_memory
from passes.shard.collectives import collective
from passes.shard.cut_weights import cut_weights
from passes.shard.insert_collectives import Lowered, insert_collectives
from passes.shard.parameter_sharding import gathered_axes
from passes.shard.propagate import propagate
from passes.shard.query_groups import group_remark, split_groups
from passes.shard.remarks import find_remarks
from passes.shard.ring import ring_of
from passes.shard.separable import reads_whole
from passes.shard.sharding import local_extent
from passes.stage.check_alike import check_alike
from passes.stage.differentiate import finish, join
from passes.stage.emit import emit
from passes.stage.local_stage import LocalStage
from passes.stage.split_stages import Stage, Staged, split_stages


class Verified(Protocol):
    """What a pass makes."""

    def verify(self) -> object: ...


Made = Verified | str
Watch = Callable[[str, Made], None]


def compile_program(
    traced: Traced,
    plan: Plan,
    costs: Costs | Callable[[Lowered], Costs],
    watch: Watch = lambda name, made: None,
) -> Program:
    """Run every pass after `trace`.

    costs: seconds of nodes, or a function that measures those of the lowered graph.
    watch: called with each pass's name and what it made, which prints.
    """
    check_sources(traced)
    splits_backward(plan)  # what cannot run is refused before the work begins
    watch("trace", traced)
    ranges = find_input_ranges(traced.graph)
    traced = lower_precision(traced, tables=bool(plan.parameter_axes))
    if traced.autocast:
        watch("lower_precision", traced)
    normal = normalize(traced)
    watch("normalize", normal)
    named = name_dims(normal)
    watch("name_dims", named)
    check_batch(named, plan)
    asked, plan = plan, split_groups(named, plan)
    sharded = propagate(named, plan)
    watch("propagate", sharded)
    uncut, sharded = sharded, cut_weights(sharded)
    if sharded is not uncut:
        watch("cut_weights", sharded)
    lowered = insert_collectives(sharded)
    watch("insert_collectives", lowered)
    costs = costs if isinstance(costs, Costs) else costs(lowered)
    staged = split_stages(lowered, costs)
    watch("split_stages", staged)
    staged = choose_recompute(staged)
    modules = emit_modules(staged, watch)
    notes = (*group_remark(named, asked, plan), *find_remarks(sharded))
    return replace(assemble(staged, modules, notes, costs), ranges=ranges)


def check(name: str, made: Made) -> None:
    """A watch that verifies what each pass made. Raises: AssertionError."""
    if not isinstance(made, str):  # an emitted module is proved by what it computes
        made.verify()


def check_sources(traced: Traced) -> None:
    """There are parameters, and something to compute with them."""
    if not traced.graph.params:
        raise CaptureError(
            "the model computes with no parameters",
            fix="let its modules be attributes of it, or of an nn.ModuleList, so that "
            "model.parameters() has theirs",
        )
    for v in traced.graph.inputs:
        if 0 in v.shape:
            raise BatchError(
                f"the batch field '{v.name}' is empty: {v.type}",
                fix="give an example of a batch as the steps will have it",
            )


def check_batch(named: Named, plan: Plan) -> None:
    """Every rank and every microbatch must get a whole, equal part of the batch."""
    parts = plan.microbatches
    for axis in plan.data_axes:
        if axis != TIME:
            parts *= plan.size(axis)
    for v in named.graph.inputs:
        first = named.dims[v.name][0] if v.shape else ()
        split = [d for d in first if d.name == "batch"]
        if not split or split[0].size % parts == 0:
            continue
        ranks, together = parts // plan.microbatches, v.shape[0] // split[0].size
        if together > 1 and reads_whole(named, split[0]):
            continue  # no batch is large enough: `propagate` names what reads it whole
        in_groups = f", of which {together} go together," if together > 1 else ""
        fix = f"use a batch that {parts * together} divides"
        if split[0].size % ranks == 0:
            most = gcd(split[0].size // ranks, plan.microbatches)
            fix = f"use microbatches={most}, or {fix.removeprefix('use ')}"
        raise BatchError(
            f"the batch of {v.shape[0]} samples ('{v.name}'){in_groups} does not "
            f"divide into {plan.microbatches} microbatches on {ranks} data parallel "
            "ranks",
            fix=fix,
        )


def emit_modules(
    staged: Staged, watch: Watch
) -> list[tuple[dict[str, str], dict[str, tuple[str, LocalStage]]]]:
    """For each stage: coordinates -> key, and key -> (text, local stage).

    Stages of equal text, and ranks of equal shapes, are worked out once.
    """
    plan = staged.plan
    halves = splits_backward(plan)
    sizes = {axis: plan.size(axis) for axis in plan.axes}
    mesh_axes = [(a, n) for a, n in plan.mesh.axes if a != "pp"]
    known: dict[object, tuple[str, str, LocalStage]] = {}
    found = []
    for stage in staged.stages:
        text = stage.text()
        policies = stage_policies(stage, plan)
        keys: dict[str, str] = {}
        texts: dict[str, tuple[str, LocalStage]] = {}
        ranks: list[tuple[dict[str, int], str]] = []
        for place in product(*(range(n) for _, n in mesh_axes)):
            coords = {a: i for (a, _), i in zip(mesh_axes, place, strict=True)}
            full = {**dict.fromkeys(sizes, 0), **coords}
            shapes = _shape_class(stage, sizes, full)
            key = (text, shapes, *policies.items())
            if key not in known:
                made = (plan.zero, halves, plan.scales_loss)
                joint = join(stage, sizes, full, *made)
                watch("join", joint)
                local = finish(joint, policies)
                watch("finish", local)
                module = emit(local, len(staged.stages))
                digest = hashlib.sha256(module.encode()).hexdigest()[:16]
                known[key] = (digest, module, local)
                watch(f"emit-{digest}", module)
            digest, module, local = known[key]
            keys[coords_text(coords)] = digest
            texts[digest] = (module, local)
            ranks.append((coords, digest))
        check_alike(ranks, {key: local for key, (_, local) in texts.items()})
        found.append((keys, texts))
    return found


def _shape_class(
    stage: Stage, sizes: Mapping[str, int], coords: Mapping[str, int]
) -> tuple[int, ...]:
    """What a rank's shapes depend on: its extent of every dim that is split."""
    splits = {
        (dim.size, axes)
        for name, sharding in stage.shardings.items()
        for dims, slots in zip(stage.dims[name], sharding.slots, strict=True)
        for dim, axes in zip(dims, slots, strict=True)
        if axes
    }
    extents = [local_extent(n, axes, sizes, coords) for n, axes in sorted(splits)]
    nested = any(len(axes) > 1 and n % _parts(axes, sizes) for n, axes in splits)
    return (*extents, *(coords.values() if nested else ()))


def _parts(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    parts = 1
    for axis in axes:
        parts *= sizes[axis]
    return parts


def assemble(
    staged: Staged,
    modules: list[tuple[dict[str, str], dict[str, tuple[str, LocalStage]]]],
    notes: tuple[str, ...],
    costs: Costs,
) -> Program:
    """Gather what ranks need to know beside the texts."""
    lowered, plan = staged.lowered, staged.plan
    graph, traced = lowered.graph, lowered.traced
    locals_ = [local for _, texts in modules for _, local in texts.values()]
    # Stages of equal text share what was worked out for the first of them.
    firsts = [
        replace(texts[next(iter(keys.values()))][1], stage=stage)
        for stage, (keys, texts) in zip(staged.stages, modules, strict=True)
    ]
    loss = lowered.shardings[graph.outputs[0].name]
    footprints = [footprint(first) for first in firsts]
    seconds = [
        s.seconds + recompute_seconds(first)
        for s, first in zip(staged.stages, firsts, strict=True)
    ]
    send = max(f.sent for f in footprints) / costs.link_bytes_per_second
    limits = activation_budget(plan, firsts, traced.trainable)
    schedule = choose_schedule(plan, seconds, footprints, limits, send)
    memory = rank_memory(schedule, firsts, footprints, traced.trainable, plan.offload)
    check_memory(memory, plan.memory)
    return Program(
        plan=plan,
        schedule=schedule,
        stages=tuple(
            StageSpec(
                layers=stage.modules,
                names=stage.names,
                modules=keys,
                seconds=seconds[stage.index],
                waits=stage.waits,
                flops=first.flops,
                footprint=footprints[stage.index],
            )
            for stage, (keys, _), first in zip(
                staged.stages, modules, firsts, strict=True
            )
        ),
        parameters=_specs(staged, graph.params),
        buffers=_specs(staged, graph.buffers),
        aliases=traced.aliases,
        inputs={v.name: (v.shape, dtype_name(v.dtype)) for v in graph.inputs},
        loss_pending=tuple(axis for axis, _ in loss.pending),
        loss_dtype=dtype_name(graph.outputs[0].dtype),
        literals=dict(traced.literals),
        groups=_groups(locals_),
        communication=tuple(
            replace(c, stage=i)
            for i, first in enumerate(firsts)
            for c in communication(first)
        ),
        modules={k: text for _, texts in modules for k, (text, _) in texts.items()},
        memory=memory,
        send=send,
        notes=notes,
    )


def _specs(staged: Staged, values: tuple[Value, ...]) -> dict[str, ParameterSpec]:
    """Where each of some parameters or buffers rests."""
    lowered = staged.lowered
    gathered = gathered_axes(lowered.graph)
    holders: dict[str, list[int]] = {}
    for stage in staged.stages:
        for name in stage.names.values():
            holders.setdefault(name, []).append(stage.index)
    traced = lowered.traced
    sources: dict[str, list[int]] = {}
    for v in values:
        sources.setdefault(traced.part(v).source, []).extend(holders.get(v.name, ()))
    found = {}
    for v in values:
        part = traced.part(v)
        sharding, dims = lowered.shardings[v.name], lowered.dims[v.name]
        trainable = v.name in lowered.traced.trainable
        pending = [a for a in staged.plan.axes if a in sharding.varying and a != TIME]
        found[v.name] = ParameterSpec(
            shape=v.shape,
            dtype=dtype_name(v.dtype),
            factors=tuple(tuple(d.size for d in dim) for dim in dims),
            dims=tuple(tuple(d.name for d in dim) for dim in dims),
            slots=sharding.slots,
            pending=tuple(pending) if trainable else (),
            gathered=gathered.get(v.name, ()),
            # What nothing reads of a weight is where the rest of it is.
            stages=tuple(holders.get(v.name) or sorted({*sources[part.source]})),
            trainable=trainable,
            part=part,
        )
    return found


def _groups(locals_: list[LocalStage]) -> tuple[tuple[str, ...], ...]:
    """The sets of axes that collectives run over, each once, in a fixed order."""
    nodes = [node for local in locals_ for node in local.nodes]
    sent = {found[1] for node in nodes if (found := collective(node))}
    rings = {(ring,) for node in nodes if (ring := ring_of(node)) is not None}
    return tuple(sorted(sent | rings))
