"""Bytes of blocks that ZeRO has alive while a part runs, beside the part's own.

Counted on the nodes of a rank that holds parameters whole and makes gradients, see
`passes.stage.differentiate.join_both`: where these are used says when
`passes.stage.overlap` would gather and scatter them. A block is what neighbours of one
layer use. Its weights arrive in rows while the block before computes, are whole from
the block's first use on, each until its own last one. Its gradients stay until the last
is made, and are then on their way, with the others' addends, until those of the next
block are. Stages are priced in pieces: where neither the stage nor the model ends, what
lies beyond a piece counts as a block like the one next to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from ..capture.lower_precision import CAST
from ..cost import Amounts
from ..graph import Location, Node, Value
from ..ops.cotangents import ZEROS
from ..ops.memory import may_alias
from ..shard.parameter_sharding import find_casts
from ..stage.local_stage import LocalStage
from ..stage.overlap import PAUSE, READY

Runs = Collection[tuple[int, int]]  # of nodes that are a function, from begin to end
NOTHING = -1e18  # less than any bytes are; finite, so that it may be added
# Whether a stage begins with a piece, and ends with it.
ENDS = ((False, False), (True, False), (False, True), (True, True))


class _Use(NamedTuple):
    """The nodes at which a parameter is used first and last, or at which its gradient
    is ready."""

    first: int
    last: int
    bytes: int
    dtype: torch.dtype
    layer: str
    name: str


@dataclass(frozen=True)
class BlockMessages(Amounts):
    """The parameters that a part gathers by block, or the gradients that leave it:
    messages, one for each dtype of a block, and their bytes; the same for parameters
    that are counted apart; and bytes of the largest block."""

    calls: float = 0.0
    bytes: float = 0.0
    calls_of_some: float = 0.0
    of_some: float = 0.0
    largest: float = 0.0


def block_messages(
    local: LocalStage,
    nodes: Sequence[Node],
    some: Collection[str],
    made: Mapping[str, Value] | None = None,
) -> BlockMessages:
    """What `passes.stage.overlap` would send for some nodes of a stage, if ranks held
    shares of its parameters. some: names of parameters that are counted apart. made: by
    parameter, gradients; None: of parameters."""
    if made is None:
        owner = find_casts(local.prologue, local.params)
        blocks = _blocks(_uses(nodes, (), _gathered(local, owner)))
    else:
        owner = {g.name: name for name, g in made.items()}
        blocks = _blocks(_gradients(nodes, made))
    amounts: list[float] = []
    for apart in (False, True):
        own = [
            [use for use in block if (owner.get(use.name, use.name) in some) == apart]
            for block in blocks
        ]
        calls = sum(len({use.dtype for use in block}) for block in own)
        amounts += [calls, sum(use.bytes for block in own for use in block)]
    amounts.append(max((sum(u.bytes for u in block) for block in blocks), default=0))
    return BlockMessages(*amounts)


def _gathered(local: LocalStage, casts: Mapping[str, str]) -> dict[str, Value]:
    """The parameters that are computed with, by name, or their casts."""
    made = (v for node in local.prologue for v in node.results if v.name in casts)
    return {v.name: v for v in (*local.params, *made)}


class Blocks:
    """What is beside the nodes of a stage, by block: gradients, as in ZeRO-2; and
    weights too, as in ZeRO-3, in the precision in which they are gathered.

    made: by parameter, gradients. left_out: names of parameters that no other rank has,
    which are never gathered. tied: of those that the model's begin uses as well, which
    this is the end of: they are whole for a forward, and their gradients from when they
    are ready to the end of a backward.
    """

    def __init__(
        self,
        local: LocalStage,
        made: Mapping[str, Value],
        left_out: Collection[str],
        tied: Collection[str] = (),
    ) -> None:
        self.local, self.made = local, made
        casts = find_casts(local.prologue, local.params)
        self.weights = _gathered(local, casts)

        def all_of(names: Collection[str]) -> set[str]:
            of_casts = (name for name, held in casts.items() if held in names)
            of_made = (g.name for name, g in made.items() if name in names)
            return {*names, *of_casts, *of_made}

        self.left_out, self.tied = all_of(left_out), all_of(tied)

    @property
    def gathering(self) -> LocalStage:
        """The stage, with a pause before each block's first use, when it is waited for:
        functions end there."""
        local = self.local
        forward = self._paused(local.forward, self.tied)
        backward = self._paused(local.backward)
        weight = local.weight_half and self._paused(local.weight_half)
        return replace(local, forward=forward, backward=backward, weight_half=weight)

    def _paused(
        self, nodes: Sequence[Node], apart: Collection[str] = ()
    ) -> tuple[Node, ...]:
        placed: list[Node] = []
        done = 0
        uses = _uses(nodes, (), self.weights)
        for first, *_ in _blocks(uses, self.left_out.union(apart)):
            where = Location(first.layer)
            pause = Node(PAUSE, ((),), {}, (), where)
            placed += [*nodes[done : first.first], pause]
            done = first.first
        return (*placed, *nodes[done:])

    def beside(
        self, nodes: Sequence[Node], runs: Runs, forward: bool, gathers: bool
    ) -> np.ndarray:
        """Bytes beside each node for each of `ENDS`, by which there are blocks next to
        these; and again only where a block's gradients are ready, when shares of the
        block before arrive: none of these, and as many bytes as of whole gradients,
        [ends, 3, nodes]; `NOTHING` at other nodes. gathers: as in ZeRO-3; nodes: of
        `gathering` then."""
        count = len(nodes)
        ready = _gradients(nodes, self.made)
        grads = _blocks(ready, self.left_out | self.tied)
        uses = _uses(nodes, runs, self.weights) if gathers else []
        read = _blocks(uses, self.left_out | self.tied if forward else self.left_out)
        stays = _Alive(count)
        for use in (use for use in ready if use.name in self.tied):
            stays.add(use.first + 1, count, use.bytes)
        for use in (use for use in uses if forward and use.name in self.tied):
            stays.add(0, count, use.bytes)
        fixed = stays.levels()
        if self.left_out:  # they are added to what is there
            fixed = fixed - _made(nodes, self.left_out)

        @cache
        def rows(before: bool, after: bool) -> list[np.ndarray]:
            beside = _scatter(count, grads, before) + fixed
            if gathers:
                beside = beside + _gather(count, read, after)
            more = (_ready(grads, before, arriving) for arriving in (0, 1))
            return [beside, *(_only(own, beside) for own in more)]

        cases = []
        for begins, ends in ENDS:
            sides = self.local.receives and not begins, not (self.local.loss or ends)
            cases.append(rows(*map(bool, sides if forward else sides[::-1])))
        return np.array(cases)


def _made(nodes: Sequence[Node], names: Collection[str]) -> np.ndarray:
    """Bytes that gradients take until they are ready, beyond those that they would take
    if they were added to others instead: at the end of the run in which they are made,
    see `passes.stage.runs.gather_runs`, and in the precision in which they are made; or
    as they are made, of products that begin with zeros."""
    more = _Alive(len(nodes))
    told = ((i + 1, n.operands) for i, n in enumerate(nodes) if n.op == READY)
    ready = {v.name: i for i, own in told for v in own if v.name in names}
    waiting: list[tuple[Value, int, int]] = []
    layer = ""

    def end(at: int) -> None:
        for v, begin, kept in waiting:
            more.add(begin, at, v.bytes - kept)
            more.add(at, ready[v.name], v.bytes)
        waiting.clear()

    for i, node in enumerate(nodes):
        if node.is_comm or node.location.layer != layer:
            end(i)
        layer = node.location.layer
        for v in node.results:
            if v.name not in ready:
                continue
            if node.op == CAST:
                more.add(i, i + 1, v.bytes)
                waiting.append((v, i + 1, node.operands[0].bytes))
            else:
                waiting.append((v, i, 0 if node.op == ZEROS else v.bytes))
    return more.levels()


def _ready(
    blocks: Sequence[Sequence[_Use]], before: bool, arriving: int
) -> dict[int, int]:
    """The nodes where gradients of a block are ready, with how much more is there of
    those of the block before than will be on its way of these.

    arriving: what share of them arrives.
    """
    sizes = [sum(use.bytes for use in block) for block in blocks]
    ends = [block[0].last for block in blocks]
    first = sizes[0] if blocks and before else 0
    pairs = zip([first, *sizes], sizes, strict=False)
    more = [(2 + arriving) * x - 2 * y for x, y in pairs]
    return dict(zip(ends, more, strict=True))


def _only(nodes: Mapping[int, int], row: np.ndarray) -> np.ndarray:
    """The levels of these nodes, with their bytes added, and NOTHING elsewhere."""
    own = np.full(row.shape, NOTHING)
    for i, more in nodes.items():
        own[i] = row[i] + more
    return own


def _uses(nodes: Sequence[Node], runs: Runs, moved: Mapping[str, Value]) -> list[_Use]:
    """The uses of parameters and of views of them, ordered by the first use."""
    if not moved:
        return []
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    ends = list(range(len(nodes)))  # what a function is given stays until it returns
    for begin, end in runs:
        ends[begin:end] = [end - 1] * (end - begin)
    owners = {name: name for name in moved}
    for i, node in enumerate(nodes):
        own = [owners.get(v.name) for v in node.operands]
        for name in filter(None, own):
            first.setdefault(name, i)
            last[name] = ends[i]
        if own and own[0] and may_alias(node):
            owners.update((v.name, own[0]) for v in node.results)
    return [
        _Use(i, last[n], moved[n].bytes, moved[n].dtype, nodes[i].location.layer, n)
        for n, i in first.items()
    ]


def _gradients(nodes: Sequence[Node], made: Mapping[str, Value]) -> list[_Use]:
    """The positions at which gradients are ready."""
    names = {v.name for v in made.values()}
    return [
        _Use(i, i, v.bytes, v.dtype, node.location.layer, v.name)
        for i, node in enumerate(nodes)
        if node.op == READY
        for v in node.operands
        if v.name in names
    ]


def _blocks(uses: Sequence[_Use], left_out: Collection[str] = ()) -> list[list[_Use]]:
    """Neighbours of one layer."""
    own = (use for use in uses if use.name not in left_out)
    return [list(block) for _, block in groupby(own, key=lambda use: use.layer)]


class _Alive:
    """Counts bytes alive at each node."""

    def __init__(self, nodes: int) -> None:
        self.changes = [0] * (nodes + 1)

    def add(self, begin: int, end: int, size: int) -> None:
        """Counts `size` bytes as alive from node `begin` until before node `end`."""
        if begin < end:
            self.changes[begin] += size
            self.changes[end] -= size

    def levels(self) -> np.ndarray:
        return np.cumsum(self.changes[:-1], dtype=np.float64)


def _gather(nodes: int, blocks: Sequence[Sequence[_Use]], more: bool) -> np.ndarray:
    """more: another block is gathered while the last one computes."""
    alive, start = _Alive(nodes), 0
    sizes = [sum(use.bytes for use in block) for block in blocks]
    sizes.append(sizes[-1] if sizes and more else 0)
    for i, block in enumerate(blocks):
        begin = block[0].first
        # It is whole, beside its rows, while it is waited for: in the pause before. A
        # tensor that is alone becomes whole where it arrived.
        alive.add(start, begin - (len(block) == 1), sizes[i])
        for use in block:
            alive.add(begin - 1, use.last + 1, use.bytes)
        start = begin
    alive.add(start, nodes, sizes[-1])
    return alive.levels()


def _scatter(nodes: int, blocks: Sequence[Sequence[_Use]], before: bool) -> np.ndarray:
    """before: gradients of another block are on their way when the first begins."""
    alive = _Alive(nodes)
    sizes = [sum(use.bytes for use in block) for block in blocks]
    ends = [*(block[0].last for block in blocks), nodes]
    if blocks and before:
        alive.add(0, ends[0], 2 * sizes[0])
    for size, end, landed in zip(sizes, ends, ends[1:], strict=False):
        alive.add(end, landed, 2 * size)
    return alive.levels()
