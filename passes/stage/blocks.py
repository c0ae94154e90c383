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
from itertools import accumulate, groupby
from operator import add
from typing import NamedTuple

import torch

from ..cost import Amounts
from ..graph import Node, Value
from ..shard.parameter_sharding import find_casts
from ..stage.local_stage import LocalStage

Runs = Collection[tuple[int, int]]  # of nodes that are a function, from begin to end
# What may be beside nodes, in several cases: bytes at each of them.
Besides = Callable[[Sequence[Node], Runs], Sequence[Sequence[int]]]


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
    blocks = _blocks(_uses(nodes, (), moved, by_first=not grads))
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


def beside_blocks(local: LocalStage, some: Collection[str]) -> Besides:
    """For `passes.stage.count_footprint`: nothing; gradients by block, as in ZeRO-2;
    and weights too, as in ZeRO-3, in the precision in which they are gathered. These
    two again without parameters that no other rank has, `some`, if there are any, which
    are never gathered; and all of that again for a stage that is no piece of one, with
    blocks next to it."""
    casts = find_casts(local.prologue, local.params)
    weights = _gathered(local, casts)
    grads = {g.name: g for g in local.grads.values()}
    alone = {*some, *(name for name, held in casts.items() if held in some)}
    alone |= {g.name for name, g in local.grads.items() if name in some}

    def besides(nodes: Sequence[Node], runs: Runs) -> list[Sequence[int]]:
        count = len(nodes)
        read = _uses(nodes, runs, weights, by_first=True)
        made = _uses(nodes, runs, grads, by_first=False)
        rows: list[Sequence[int]] = [[0] * count]
        for neighbours in (True, False):
            before = neighbours and bool(local.receives)
            after = neighbours and local.loss is None
            if nodes is not local.forward:
                before, after = after, before
            for left_out in (set[str](), alone) if some else (set[str](),):
                scattered = _scatter(count, _blocks(made, left_out), before)
                gathered = _gather(count, _blocks(read, left_out), after)
                rows += [scattered, [*map(add, gathered, scattered)]]
        return rows

    return besides


def _uses(
    nodes: Sequence[Node], runs: Runs, moved: Mapping[str, Value], by_first: bool
) -> list[_Use]:
    """In the order of first or last uses. Views of parameters count as uses of
    them."""
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
    return sorted(uses, key=lambda use: use.first if by_first else use.last)


def _blocks(uses: Sequence[_Use], left_out: Collection[str] = ()) -> list[list[_Use]]:
    """Neighbours of one layer."""
    own = (use for use in uses if use.name not in left_out)
    return [list(block) for _, block in groupby(own, key=lambda use: use.layer)]


class _Alive:
    """Bytes alive at each of so many nodes."""

    def __init__(self, nodes: int) -> None:
        self.changes = [0] * (nodes + 1)

    def add(self, begin: int, end: int, size: int) -> None:
        """So many from one node until before another one."""
        if begin < end:
            self.changes[begin] += size
            self.changes[end] -= size

    def levels(self) -> list[int]:
        return list(accumulate(self.changes[:-1]))


def _gather(nodes: int, blocks: Sequence[Sequence[_Use]], more: bool) -> list[int]:
    """more: another block is gathered while the last one computes."""
    alive, start = _Alive(nodes), 0
    sizes = [sum(use.bytes for use in block) for block in blocks]
    sizes.append(sizes[-1] if sizes and more else 0)
    for i, block in enumerate(blocks):
        begin = block[0].first
        alive.add(start, begin, sizes[i])
        # A tensor that is alone becomes whole where it arrived; rows of the next block
        # take the place of those that were copied.
        rows = sizes[i] if len(block) > 1 else 0
        alive.add(begin, begin + 1, max(0, rows - sizes[i + 1]))
        for use in block:
            alive.add(begin, use.last + 1, use.bytes)
        start = begin
    alive.add(start, nodes, sizes[-1])
    return alive.levels()


def _scatter(nodes: int, blocks: Sequence[Sequence[_Use]], before: bool) -> list[int]:
    """before: gradients of another block are on their way when the first begins."""
    alive = _Alive(nodes)
    sizes = [sum(use.bytes for use in block) for block in blocks]
    if blocks and before:
        alive.add(0, blocks[0][-1].last, 2 * sizes[0])
    for i, block in enumerate(blocks):
        end = block[-1].last
        for use in block:
            alive.add(use.first, end + 1, use.bytes)
        landed = blocks[i + 1][-1].last if i + 1 < len(blocks) else nodes
        alive.add(end, landed, 2 * sizes[i])
    return alive.levels()
