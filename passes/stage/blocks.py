"""What ZeRO has alive by block while a part runs, beside what the part itself has.

Counted on the nodes of a rank that holds parameters and gradients whole: where these
are used says when `passes.stage.overlap` would gather and scatter them. A block is what
neighbours of one layer use. Its weights arrive in rows while the block before computes,
are whole from the block's first use on, each until its own last one. Its gradients are
whole until the last is made, and then on their way, with the others' addends, until
those of the next block are. What lies beyond the stage, unless the model ends there,
counts as a block like the one next to it, since stages are priced in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from ..cost import Amounts
from ..graph import Node, Value
from ..shard.parameter_sharding import find_casts
from ..stage.local_stage import LocalStage

Runs = Collection[tuple[int, int]]  # of nodes that are a function, from begin to end
Beside = Callable[[Sequence[Node], Runs], Sequence[int]]  # bytes at each of the nodes


class _Use(NamedTuple):
    """The nodes at which a parameter or its gradient is used first and last."""

    first: int
    last: int
    bytes: int
    dtype: torch.dtype
    layer: str
    name: str


@dataclass(frozen=True)
class BlockMessages(Amounts):
    """Parameters that a part gathers by block, or gradients that leave it: messages,
    one for each dtype of a block, bytes of them all, those of some, and those of the
    largest block."""

    calls: float = 0.0
    bytes: float = 0.0
    of_some: float = 0.0
    largest: float = 0.0


def block_messages(
    local: LocalStage, nodes: Sequence[Node], some: Collection[str], grads: bool
) -> BlockMessages:
    """What `passes.stage.overlap` would send for some nodes of a stage, if ranks held
    shares of its parameters. grads: of gradients, else of parameters. some: names of
    parameters that are counted apart."""
    casts = find_casts(local.prologue, local.params)
    moved, owner = _gathered(local, casts), casts
    if grads:
        moved = {g.name: g for g in local.grads.values()}
        owner = {g.name: name for name, g in local.grads.items()}
    blocks = _uses(nodes, (), moved, by_first=not grads)
    uses = [use for block in blocks for use in block]
    apart = [u.bytes for u in uses if owner.get(u.name, u.name) in some]
    largest = max((sum(u.bytes for u in block) for block in blocks), default=0)
    whole = sum(u.bytes for u in uses)
    calls = sum(len({u.dtype for u in block}) for block in blocks)
    return BlockMessages(calls, whole, sum(apart), largest)


def _gathered(local: LocalStage, casts: Mapping[str, str]) -> dict[str, Value]:
    """What is computed with of parameters, by name; of some it is a cast."""
    made = (v for node in local.prologue for v in node.results if v.name in casts)
    return {v.name: v for v in (*local.params, *made)}


def beside_blocks(
    local: LocalStage, zero: int, alone: Collection[str] = (), neighbours: bool = True
) -> Beside:
    """For `passes.stage.count_footprint`: gradients by block from ZeRO-2 on,
    and weights from ZeRO-3 on, in the precision in which they are gathered. alone:
    parameters that no other rank has, which are never gathered. neighbours: whether the
    stage is a piece of one, with blocks next to it."""
    casts = find_casts(local.prologue, local.params)
    weights = {
        name: v
        for name, v in _gathered(local, casts).items()
        if zero > 2 and casts.get(name, name) not in alone
    }
    grads = {
        g.name: g for name, g in local.grads.items() if zero > 1 and name not in alone
    }

    def beside(nodes: Sequence[Node], runs: Runs) -> Sequence[int]:
        alive = [0] * len(nodes)
        before = neighbours and bool(local.receives)
        after = neighbours and local.loss is None
        if nodes is not local.forward:
            before, after = after, before
        _gather(alive, _uses(nodes, runs, weights, by_first=True), after)
        _scatter(alive, _uses(nodes, runs, grads, by_first=False), before)
        return alive

    return beside


def _uses(
    nodes: Sequence[Node], runs: Runs, moved: Mapping[str, Value], by_first: bool
) -> list[list[_Use]]:
    """By block, in the order of first or last uses. Views of parameters count as uses
    of them."""
    if not moved:
        return []
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    ends = list(range(len(nodes)))  # what a function is given stays until it returns
    for begin, end in runs:
        ends[begin:end] = [end - 1] * (end - begin)
    for i, node in enumerate(nodes):
        for v in node.operands:
            if v.name in moved:
                first.setdefault(v.name, i)
                last[v.name] = ends[i]
    uses = []
    for n, i in first.items():
        layer = nodes[i if by_first else last[n]].location.layer
        uses.append(_Use(i, last[n], moved[n].bytes, moved[n].dtype, layer, n))
    uses.sort(key=lambda use: use.first if by_first else use.last)
    return [list(own) for _, own in groupby(uses, key=lambda use: use.layer)]


def _gather(alive: list[int], blocks: Sequence[Sequence[_Use]], more: bool) -> None:
    """more: another block is gathered while the last one computes."""
    start = 0
    sizes = [sum(use.bytes for use in block) for block in blocks]
    sizes.append(sizes[-1] if sizes and more else 0)
    for i, block in enumerate(blocks):
        begin = block[0].first
        for at in range(start, begin):
            alive[at] += sizes[i]
        # A tensor that is alone becomes whole where it arrived; rows of the next block
        # take the place of those that were copied.
        rows = sizes[i] if len(block) > 1 else 0
        alive[begin] += max(0, rows - sizes[i + 1])
        for use in block:
            for at in range(begin, use.last + 1):
                alive[at] += use.bytes
        start = begin
    for at in range(start, len(alive)):
        alive[at] += sizes[-1]


def _scatter(alive: list[int], blocks: Sequence[Sequence[_Use]], before: bool) -> None:
    """before: gradients of another block are on their way when the first begins."""
    if blocks and before:
        for at in range(blocks[0][-1].last):
            alive[at] += 2 * sum(use.bytes for use in blocks[0])
    for i, block in enumerate(blocks):
        end = block[-1].last
        for use in block:
            for at in range(use.first, end + 1):
                alive[at] += use.bytes
        landed = blocks[i + 1][-1].last if i + 1 < len(blocks) else len(alive)
        for at in range(end, landed):
            alive[at] += 2 * sum(use.bytes for use in block)
