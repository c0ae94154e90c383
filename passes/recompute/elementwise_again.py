"""elementwise_again: what a backward makes again, for little, of what is kept for it.

Where elementwise ops in a row run as one, a backward that reads `silu(x)` may as well
read `x`, and values between need not be kept. What is kept is a minimum cut, each value
as wide as it has bytes, between what other ops make and what elementwise ops of the
backward read (He and Yu 2023, "Transcending runtime-memory tradeoffs in checkpointing
by being fusion aware"). What a product of the backward reads lies in memory there, and
is kept as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..graph import Node, Value
from ..ops.memory import find_owners
from ..ops.op import is_view
from ..ops.rules import is_fusable, is_pointwise

SOURCE, SINK = -1, -2


@dataclass(frozen=True)
class _Storages:
    """owners: value -> its storage. sizes: bytes of storages. hard: storages that a
    non-elementwise op of the backward reads; soft: that other ops of it read. crossing:
    that several layers read. there: names of values that are kept anyway."""

    owners: Mapping[str, str]
    sizes: Mapping[str, int]
    hard: Collection[str]
    soft: Collection[str]
    crossing: Collection[str]
    there: Collection[str]

    def root(self, v: Value) -> str:
        return self.owners.get(v.name, v.name)


def elementwise_again(
    forward: Sequence[Node], backward: Sequence[Node], there: Collection[str]
) -> set[str]:
    """Names of the values that the backward makes again. there: names of what it can
    read at any time."""
    storages = _storages(forward, backward, there)
    layers: dict[str, list[Node]] = {}
    for node in forward:
        layers.setdefault(node.location.layer, []).append(node)
    again = {s for own in layers.values() for s in _beyond_the_cut(own, storages)}
    return {v.name for n in forward for v in n.results if storages.root(v) in again}


def _storages(
    forward: Sequence[Node], backward: Sequence[Node], there: Collection[str]
) -> _Storages:
    owners = find_owners([*forward, *backward])
    sizes: dict[str, int] = {}
    layers: dict[str, set[str]] = {}
    for node in forward:
        for v in (*node.operands, *node.results):
            root = owners.get(v.name, v.name)
            sizes[root] = max(sizes.get(root, 0), v.bytes)
            layers.setdefault(root, set()).add(node.location.layer)
    read: dict[bool, set[str]] = {True: set(), False: set()}
    for node in backward:
        if not is_view(node):
            names = (owners.get(v.name, v.name) for v in node.operands)
            read[is_fusable(node)].update(names)
    crossing = {root for root, those in layers.items() if len(those) > 1}
    return _Storages(owners, sizes, read[False], read[True], crossing, there)


def _beyond_the_cut(nodes: Sequence[Node], storages: _Storages) -> set[str]:
    """Which storages that a layer makes are beyond the minimum cut."""
    numbers: dict[str, int] = {}
    wide: dict[int, int] = {}
    open_to: dict[tuple[int, int], None] = {}

    def add(root: str, comes: bool) -> int:
        """Adds a storage to the graph. comes: a node that is not run again makes it."""
        if root not in numbers:
            numbers[root] = len(numbers)
        number = numbers[root]
        wide[number] = storages.sizes[root]
        if comes or root in storages.crossing:
            open_to[SOURCE, 2 * number] = None
        if root in storages.hard:
            open_to[SOURCE, 2 * number + 1] = None
        elif root in storages.soft:
            open_to[2 * number + 1, SINK] = None
        return number

    made = {v.name for n in nodes for v in n.results if storages.root(v) == v.name}
    for node in nodes:
        for v in node.results:
            if v.name not in made:
                continue
            number = add(v.name, not is_pointwise(node))
            if not is_pointwise(node):
                continue
            for x in node.operands:
                root = storages.root(x)
                if root not in storages.there:
                    source = numbers[root] if root in made else add(root, True)
                    open_to[2 * source + 1, 2 * number] = None
    # Of layers that are alike, whatever share of them a rank has, widths are alike.
    unit = math.gcd(*wide.values()) or 1
    widths = tuple(wide[i] // unit for i in range(len(wide)))
    beyond = _minimum_cut(widths, tuple(open_to))
    return {root for root in made if 2 * numbers[root] in beyond}


# It is there once for many layers; and while garbage is not collected, graphs stay.
@lru_cache(maxsize=256)
def _minimum_cut(
    widths: tuple[int, ...], open_to: tuple[tuple[int, int], ...]
) -> frozenset[int]:
    """The ends, on the sink's side, of a network of values: the i-th enters at 2i and
    leaves at 2i + 1, as wide as that; what else is open has no end of width."""
    import networkx as nx  # slow to import, and not all commands need it

    net = nx.DiGraph()
    net.add_nodes_from((SOURCE, SINK))
    for i, width in enumerate(widths):
        net.add_edge(2 * i, 2 * i + 1, capacity=width)
    net.add_edges_from(open_to)  # without a capacity there is none to exceed
    _, (_, beyond) = nx.minimum_cut(net, SOURCE, SINK)
    return frozenset(beyond)
