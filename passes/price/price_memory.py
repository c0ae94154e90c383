"""What a rank's stage holds in memory, as amounts of its account.

ZeRO shares out a parameter over the ranks that would hold the same of it. Experts that
an axis ep splits are others on each of its ranks, so they are counted apart, as is the
most that is alive where nobody shares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ..cost import Exchange, join_exchanges, traffic
from ..graph import Node
from ..mesh import AXES, TIME
from ..ops.memory import ADD_EACH
from ..ops.op import op_of
from ..ops.products import of_weight_grad
from ..price.account import Account, Alive, Held, PartCost
from ..shard.parameter_sharding import find_casts
from ..stage.blocks import beside_blocks, block_messages
from ..stage.count_footprint import footprints, nothing_beside
from ..stage.local_stage import LocalStage


def with_held(
    account: Account, local: LocalStage, shares: bool, offload: bool
) -> Account:
    """The account of what a stage computes, with the bytes that it holds. shares: with
    what ranks that hold shares of parameters would have alive. offload: the optimizer's
    state is not on the device."""
    experts = _experts(local)
    besides = beside_blocks(local, experts) if shares else nothing_beside
    sizes, *others = footprints(local, besides)
    among, alone = others[: len(others) // 2], others[len(others) // 2 :]
    if not experts:
        among, alone = 2 * among, 2 * alone  # there is nothing to leave out
    late = local.weight_half or ()
    nodes = {"forward": local.forward, "backward": local.backward, "weight": late}
    parts = [
        replace(
            _by_block(part, local, nodes[name], experts, grads=name != "forward"),
            alive=Alive(*[getattr(x, f"{name}_peak") for x in (sizes, *among)]),
            alone=Alive(*[getattr(x, f"{name}_peak") for x in (sizes, *alone)]),
        )
        for name, part in account.microbatch.items()
    ]
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


def _pending(name: str, local: LocalStage) -> tuple[str, ...]:
    """The axes over which a parameter's gradient is summed, without that of time."""
    return tuple(sorted(local.stage.shardings[name].varying - {TIME}))


def _by_block(
    part: PartCost,
    local: LocalStage,
    nodes: Sequence[Node],
    experts: Collection[str],
    grads: bool,
) -> PartCost:
    """With messages of parameters and gradients, by block, see `passes.price.share`."""
    # Gradients that products add to are set to 0; what is made is not added.
    zeroed = [n for n in nodes if op_of(n).flops is of_weight_grad]
    added = [n for n in nodes if n.op == ADD_EACH]
    zeros = sum(n.operands[0].bytes for n in zeroed)
    moved = replace(
        part,
        gathered=block_messages(local, nodes, experts, False),
        zeroed_calls=len(zeroed) - len(added),
        zeroed_bytes=zeros - sum(map(traffic, added)),
    )
    if not grads:
        return moved
    return replace(moved, scattered=block_messages(local, nodes, experts, True))


def _experts(local: LocalStage) -> set[str]:
    """Parameters of which each rank that holds experts has others."""
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
