"""Memory of a rank's stage, as amounts of its account.

ZeRO shares out a parameter over the ranks that would hold the same of it. Experts that
an axis ep splits are others on each of its ranks, so they are counted apart, as is the
most that is alive where nobody shares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..cost import Exchange, Levels, join_exchanges
from ..graph import Node, Value
from ..mesh import AXES, TIME
from ..price.account import WHERE, Account, Alive, Held, PartCost, PartLevels
from ..shard.parameter_sharding import find_casts
from ..stage.blocks import NOTHING, block_messages
from ..stage.count_footprint import footprint_of, levels_by_block
from ..stage.differentiate import Joint
from ..stage.local_stage import LocalStage
from ..stage.storages import Storages, storages


class Sharing(NamedTuple):
    """A stage as ranks would run it with shards of its parameters: the stage whose
    backward makes gradients; parameter -> its gradient there. peaks: whether to compute
    what would be alive at once. tied: see `passes.stage.blocks.Blocks`."""

    local: LocalStage
    made: Mapping[str, Value]
    peaks: bool = True
    tied: Collection[str] = ()


def with_held(
    account: Account, local: LocalStage, sharing: Sharing | None, offload: bool
) -> Account:
    """The account with the bytes that the stage holds. offload: the optimizer's state
    is not on the device."""
    experts = find_experts(local)
    usual = storages(local)
    sizes = footprint_of(local, usual)
    gathered = block_messages(local, local.forward, experts)
    account = account.changed(forward=account.forward.changed(gathered=gathered))
    if sharing:
        account = _with_messages(account, sharing, experts)
    parts: list[PartCost] = [
        part.changed(**dict.fromkeys(WHERE, Alive(of.peak)))
        for part, of in zip(account.microbatch.values(), usual, strict=True)
    ]
    if sharing and sharing.peaks:
        by_block = levels_by_block(sharing.local, sharing.made, experts, sharing.tied)
        parts = [
            PartLevels(**vars(part), levels=_levels(own, rows))
            for part, own, rows in zip(parts, usual, by_block, strict=True)
        ]
    elif sharing:
        parts = [PartLevels(**vars(part)) for part in parts]
    held = _held(local.params, local.grads, local.prologue, local.nodes)
    if offload:
        held = {k: x.changed(offloaded=x.trained) for k, x in held.items()}
    of_experts = (x for name, x in held.items() if name in experts)
    return replace(
        account.with_parts(*parts),
        held=sum(held.values(), Held()),
        experts=sum(of_experts, Held()),
        residuals=sizes.residuals,
        batch_residuals=_batch_residuals(local, usual[0]),
        weight_residuals=sizes.weight_residuals,
        whole=sizes.step,
        edges=sizes.edges,
        buffers=float(sum(v.bytes for v in local.buffers)),
        received=sizes.received,
        sent=sizes.sent,
        pending=join_exchanges(
            Exchange("all_reduce", _pending(v.name, local), 1, v.bytes)
            for v in local.params
            if v.name in local.grads
        ),
    )


def _batch_residuals(local: LocalStage, forward: Storages) -> int:
    """Bytes of residuals that grow with the samples of a microbatch."""
    shardings, owners = local.stage.shardings, forward.owners
    own = {
        owners[v.name]
        for v in local.residuals
        if v.name in owners and v.name in shardings and shardings[v.name].place(TIME)
    }
    return sum(forward.sizes[root] for root in own)


def _pending(name: str, local: LocalStage) -> tuple[str, ...]:
    """The axes over which a parameter's gradient is summed, but for time."""
    return tuple(sorted(local.stage.shardings[name].varying - {TIME}))


def _levels(usual: Storages, rows: np.ndarray) -> Levels:
    """Puts levels of memory in the form of `PartLevels`. usual: of a part as it is run.
    rows: bytes alive by block, see `passes.stage.count_footprint.levels_by_block`."""
    own = [usual.before, *usual.levels]
    levels = np.full((1 + len(rows), max(len(own), rows.shape[1])), NOTHING)
    levels[0, : len(own)] = own
    levels[1:, : rows.shape[1]] = rows
    return Levels(levels)


def _with_messages(
    account: Account, sharing: Sharing, experts: Collection[str]
) -> Account:
    """Adds messages of parameters and gradients by block, see `passes.price.share`."""
    local, made, *_ = sharing
    halves = [
        part.changed(
            gathered=block_messages(local, nodes, experts),
            scattered=block_messages(local, nodes, experts, made),
        )
        for part, nodes in (
            (account.backward, local.backward),
            (account.weight, local.weight_half or ()),
        )
    ]
    return account.with_parts(account.forward, *halves)


def find_experts(local: LocalStage) -> set[str]:
    """Names of parameters that differ on each rank which holds experts."""
    axes = [name for name, axis in AXES.items() if axis.holds_experts]
    shardings = local.stage.shardings
    named = ((v.name, axis) for v in local.params for axis in axes)
    return {name for name, axis in named if shardings[name].place(axis) is not None}


def held_by_both(first: Joint, last: Joint) -> Held:
    """The memory of parameters that both stages use, on each of them."""

    def by_name(joint: Joint) -> dict[str, Held]:
        params, names = joint.sources["params"], joint.stage.names
        held = _held(params, joint.grads, joint.prologue, joint.graph.nodes)
        return {names[name]: own for name, own in held.items()}

    of_first, total = by_name(first), Held()
    for name, own in by_name(last).items():
        if other := of_first.get(name):
            cast = min(own.cast, other.cast)
            read = cast + min(own.read - own.cast, other.read - other.cast)
            total += Held(own.parameters, own.trained, read)
    return total


def _held(
    params: Iterable[Value],
    grads: Collection[str],
    prologue: Sequence[Node],
    nodes: Sequence[Node],
) -> dict[str, Held]:
    """What each parameter takes. nodes: all that a rank runs, prologue and others."""
    casts = find_casts(prologue, params)
    made = {v.name: v.bytes for n in prologue for v in n.results if v.name in casts}
    readers = (n for n in nodes if not {v.name for v in n.results} & casts.keys())
    read = {v.name for n in readers for v in n.operands}
    of_casts: Counter[str] = Counter()  # by the parameter that is cast
    for name, size in made.items():
        of_casts[casts[name]] += size
    return {
        v.name: Held(
            v.bytes,
            v.bytes * (v.name in grads),
            of_casts[v.name] + v.bytes * (v.name in read),
            of_casts[v.name],
        )
        for v in params
    }
