"""Memory of a rank's stage, as amounts of its account.

ZeRO shares out a parameter over the ranks that would hold the same of it. Experts that
an axis ep splits are others on each of its ranks, so they are counted apart, as is the
most that is alive where nobody shares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..cost import Exchange, Levels, join_exchanges
from ..graph import Value
from ..mesh import AXES, TIME
from ..price.account import WHERE, Account, Alive, Held, PartCost, PartLevels
from ..shard.parameter_sharding import find_casts
from ..stage.blocks import NOTHING, block_messages
from ..stage.count_footprint import footprint_of, levels_by_block
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
    casts = find_casts(local.prologue, local.params)
    read = _read(local, casts)
    of_casts: Counter[str] = Counter()  # by the parameter that is cast
    for name, n in read.items():
        of_casts[casts.get(name, "")] += n
    held = of_experts = Held()
    for v in local.params:
        cast = of_casts[v.name]
        trained = v.bytes * (v.name in local.grads)
        of_read = cast + read.get(v.name, 0)
        own = Held(v.bytes, trained, of_read, cast, trained * offload)
        held += own
        of_experts += own if v.name in experts else Held()
    return replace(
        account.with_parts(*parts),
        held=held,
        experts=of_experts,
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


def _read(local: LocalStage, casts: Mapping[str, str]) -> dict[str, int]:
    """Bytes of parameters and of casts that are computed with, by name."""
    readers = (n for n in local.nodes if not {v.name for v in n.results} & casts.keys())
    read = {v.name for n in readers for v in n.operands}
    read_bytes = {v.name: v.bytes for v in local.params if v.name in read}
    made = (v for n in local.prologue for v in n.results)
    return read_bytes | {v.name: v.bytes for v in made if v.name in casts}
