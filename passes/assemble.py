"""assemble: what ranks need to know beside the texts of their modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .capture.rows.input_ranges import InputRange
from .emit_modules import EmittedStage
from .graph import Graph, Value
from .mesh import TIME
from .ops.attention import ring_of
from .part import Part
from .program import OutputSpec, ParameterSpec, Program, StageSpec, dtype_name
from .schedule_stages import Scheduled
from .shard.collectives import collective
from .shard.parameter_sharding import gathered_axes
from .stage.count_footprint import communication
from .stage.local_stage import LocalStage
from .stage.split_stages import Staged


def assemble(
    staged: Staged,
    emitted: Sequence[EmittedStage],
    scheduled: Scheduled,
    ranges: Mapping[str, InputRange],
    remarks: tuple[str, ...],
) -> Program:
    """Gather what ranks need to know beside the texts."""
    lowered = staged.lowered
    graph, traced = lowered.graph, lowered.traced
    firsts = [one.first for one in emitted]
    loss = lowered.shardings[graph.outputs[0].name]
    return Program(
        plan=staged.plan,
        schedule=scheduled.schedule,
        stages=tuple(
            StageSpec(
                layers=one.stage.modules,
                names=one.stage.names,
                modules=one.keys,
                flops=firsts[i].flops,
                took=scheduled.took[i],
                account=scheduled.accounts[i],
            )
            for i, one in enumerate(emitted)
        ),
        tensors=_specs(staged, graph.params),
        buffers=_updated(traced.updates) | _specs(staged, graph.buffers),
        aliases=traced.aliases,
        inputs={v.name: (v.shape, dtype_name(v.dtype)) for v in graph.inputs},
        loss_pending=tuple(axis for axis, _ in loss.pending),
        loss_dtype=dtype_name(graph.outputs[0].dtype),
        literals=dict(traced.literals),
        groups=_groups([local for e in emitted for _, local in e.texts.values()]),
        communication=tuple(
            replace(c, stage=i)
            for i, first in enumerate(firsts)
            for c in communication(first)
        ),
        modules={k: text for e in emitted for k, (text, _) in e.texts.items()},
        memory=scheduled.memory,
        remarks=remarks,
        ranges=ranges,
        outputs=_outputs(staged),
        metrics=traced.metrics,
        updates=traced.updates,
        known=traced.known,
        own_masks=traced.own_masks,
        joined={
            part.source: traced.joined[part.source]
            for part in map(traced.part, graph.params)
            if part.source in traced.joined
        },
    )


def _outputs(staged: Staged) -> dict[str, OutputSpec]:
    """The stage and place that make each output beside the loss, and its sharding."""
    lowered = staged.lowered
    specs = {}
    for name, v in zip(lowered.traced.outputs, lowered.graph.outputs[1:], strict=True):
        sharding, dims = lowered.shardings[v.name], lowered.dims[v.name]
        (stage, place) = next(
            (stage.index, stage.output_names.index(v.name))
            for stage in staged.stages
            if v.name in stage.output_names
        )
        specs[name] = OutputSpec(
            shape=v.shape,
            dtype=dtype_name(v.dtype),
            factors=tuple(tuple(d.size for d in dim) for dim in dims),
            slots=sharding.slots,
            pending=tuple(axis for axis, _ in sharding.pending),
            stage=stage,
            place=place,
        )
    return specs


def _updated(updates: Mapping[str, Graph]) -> dict[str, ParameterSpec]:
    """Buffers that updates read and make, as those that no stage computes with."""
    read = [v for graph in updates.values() for v in graph.buffers]
    made = [replace(graph.outputs[0], name=name) for name, graph in updates.items()]
    return {
        v.name: ParameterSpec(
            shape=v.shape,
            dtype=dtype_name(v.dtype),
            factors=tuple((n,) for n in v.shape),
            dims=tuple((f"d{i}",) for i in range(len(v.shape))),
            slots=(((),),) * len(v.shape),
            pending=(),
            gathered=(),
            stages=(),
            trainable=False,
            part=Part(v.name, v.shape, (0,) * len(v.shape)),
        )
        for v in (*read, *made)
    }


def _specs(staged: Staged, values: tuple[Value, ...]) -> dict[str, ParameterSpec]:
    """The sharding of each of some parameters or buffers."""
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
    specs = {}
    for v in values:
        part = traced.part(v)
        sharding, dims = lowered.shardings[v.name], lowered.dims[v.name]
        trainable = v.name in lowered.traced.trainable
        pending = [a for a in staged.plan.axes if a in sharding.varying and a != TIME]
        specs[v.name] = ParameterSpec(
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
    return specs


def _groups(locals_: list[LocalStage]) -> tuple[tuple[str, ...], ...]:
    """The sets of axes that collectives run over, each once, in a fixed order."""
    nodes = [node for local in locals_ for node in local.nodes]
    sent = {moved[1] for node in nodes if (moved := collective(node))}
    rings = {(ring,) for node in nodes if (ring := ring_of(node)) is not None}
    return tuple(sorted(sent | rings))
