"""Counts the bytes that a rank's stage keeps and sends, on its emitted nodes.

Memory is counted by storage: a view costs nothing, and what a view is made of lives as
long as the view does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..graph import Value
from ..graph_text import DTYPES
from ..mesh import PIPELINE
from ..ops.attention import passed_round, ring_of
from ..ops.memory import find_owners
from ..schedule.footprint import Communication, Footprint
from ..shard.collectives import collective, contributed_bytes
from ..shard.parameter_sharding import find_made
from ..stage.blocks import NOTHING, Blocks
from ..stage.local_stage import LocalStage
from ..stage.storages import Storages, storages

Parts = tuple[Storages, Storages, Storages]


def footprint(local: LocalStage) -> Footprint:
    """Activation memory of one microbatch."""
    return footprint_of(local, storages(local))


def footprint_of(local: LocalStage, parts: Parts) -> Footprint:
    """The footprint of a stage. parts: storages of its forward and backward halves."""
    forward, backward, weight = parts
    owners, sizes = forward.owners, forward.sizes
    residuals = {owners[v.name] for v in local.residuals if v.name in owners}
    owners = backward.owners
    weight_residuals = {
        owners[v.name] for v in local.weight_residuals if v.name in owners
    }
    step, edges = _whole(local)
    received, sent = (sum(v.bytes for v in vs) for vs in (local.receives, local.sends))
    return Footprint(
        residuals=sum(sizes[root] for root in residuals),
        forward_peak=forward.peak,
        backward_peak=backward.peak,
        weight_residuals=sum(backward.sizes[root] for root in weight_residuals),
        step=step,
        weight_peak=weight.peak,
        edges=edges,
        received=received,
        sent=sent,
    )


def levels_by_block(
    local: LocalStage,
    made: Mapping[str, Value],
    some: Collection[str],
    tied: Collection[str],
) -> list[np.ndarray]:
    """Bytes alive before the first node of each part of a microbatch and while each one
    runs, with what ZeRO has beside, see `passes.stage.blocks.Blocks`: [cases, 1 +
    nodes], where cases are ends x what is left out (nothing; some parameters, if there
    are any) x when x ZeRO-2 or ZeRO-3.

    local: of a rank that holds parameters whole and makes gradients, `made`.
    """
    rows: list[list[np.ndarray]] = [[], [], []]  # by part
    usual = storages(local)
    for left_out in (set[str](), some) if some else (set[str](),):
        blocks = Blocks(local, made, left_out, tied)
        gathering = storages(blocks.gathering)
        for number, parts in enumerate(zip(usual, gathering, strict=True)):
            for gathers, part in enumerate(parts):
                how = number == 0, bool(gathers)
                beside = blocks.beside(part.nodes, part.runs, *how)
                levels = beside + np.array(part.levels)
                rows[number].append(np.insert(levels, 0, part.before, axis=-1))
    return [_in_order(own) for own in rows]


def _in_order(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Joins [ends, when, nodes] of pairs of ZeRO-2 and 3, of which the latter has more
    nodes: [ends x pairs x when x 2, nodes]."""
    ends, when, width = rows[-1].shape
    width = max(own.shape[-1] for own in rows)
    joined = np.full((ends, len(rows) // 2, when, 2, width), NOTHING)
    for i, own in enumerate(rows):
        joined[:, i // 2, :, i % 2, : own.shape[-1]] = own
    return joined.reshape(-1, width)


def residuals_by_layer(local: LocalStage) -> dict[str, int]:
    """Returns the kept bytes that each layer's forward makes ("": none)."""
    owners = find_owners(local.forward, {v.name: v.name for v in local.receives})
    roots = {owners[v.name] for v in local.residuals if v.name in owners}
    residuals: dict[str, int] = {}
    for node in local.forward:
        size = sum(v.bytes for v in node.results if v.name in roots)
        residuals[node.location.layer] = residuals.get(node.location.layer, 0) + size
    return residuals


def _whole(local: LocalStage) -> tuple[int, int]:
    """Bytes that exist for a whole step in addition to what is held between steps, and
    the most at both ends of the step."""
    resident = {v.name for v in (*local.params, *local.buffers, *local.constants)}
    resident |= {v.name for n in local.setup for v in n.results}
    made = find_made(local.prologue, resident)
    later = (*local.forward, *local.whole_backward, *local.epilogue)
    read = {v.name for n in later for v in n.operands}
    begin, end = Storages(local.prologue, read), Storages(local.epilogue, ())
    owners = begin.owners
    roots = {owners[name] for name in made if name in owners and name in read}
    grads = sum(v.bytes for v in local.wholes)
    step = sum(begin.sizes[root] for root in roots) + grads
    return step, max(begin.peak + grads, step + end.peak)


def communication(local: LocalStage) -> list[Communication]:
    """Collectives and sends of the first rank of a stage, for one microbatch."""
    rows = []
    stage = local.stage.index
    for part, nodes, handed in (
        ("forward", local.forward, local.sends),
        ("backward", local.whole_backward, local.d_receives),
        ("step", (*local.prologue, *local.epilogue), ()),
    ):
        calls: Counter[tuple[str, tuple[str, ...], str]] = Counter()
        moved: Counter[tuple[str, tuple[str, ...], str]] = Counter()
        for node in nodes:
            if (ring := ring_of(node)) is not None:
                for dtype, count, size in passed_round(node):
                    calls["shift", (ring,), DTYPES[dtype]] += count
                    moved["shift", (ring,), DTYPES[dtype]] += size
            elif over := collective(node):
                x = node.operands[0]
                key = (*over, DTYPES.get(x.dtype, str(x.dtype)))
                calls[key] += 1
                moved[key] += contributed_bytes(node)
        for v in handed:
            if v is not None:
                sent = ("send", (PIPELINE,), DTYPES.get(v.dtype, str(v.dtype)))
                calls[sent] += 1
                moved[sent] += v.bytes
        rows += [
            Communication(stage, part, *key, calls[key], moved[key]) for key in calls
        ]
    return rows
