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

import networkx as nx

from ..graph import Node, Value
from ..ops.op import is_view
from ..ops.rules import is_fusable, is_pointwise
from ..stage.reuse import find_owners

SOURCE, SINK = "source", "sink"


@dataclass(frozen=True)
class _Storages:
    """owners: value -> whose memory it shows. sizes: bytes of these. hard: those that
    an op of the backward reads that is not elementwise; soft: those that others read.
    crossing: those that several layers read. there: names of what is there anyway."""

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
    net = nx.DiGraph()

    def add(root: str, comes: bool) -> None:
        """comes: whether it is made by what does not run again."""
        net.add_edge((root, 0), (root, 1), capacity=storages.sizes[root])
        if comes or root in storages.crossing:
            net.add_edge(SOURCE, (root, 0), capacity=math.inf)
        if root in storages.hard:
            net.add_edge(SOURCE, (root, 1), capacity=math.inf)
        elif root in storages.soft:
            net.add_edge((root, 1), SINK, capacity=math.inf)

    made = {v.name for n in nodes for v in n.results if storages.root(v) == v.name}
    for node in nodes:
        for v in node.results:
            if v.name not in made:
                continue
            add(v.name, not is_pointwise(node))
            if not is_pointwise(node):
                continue
            for x in node.operands:
                root = storages.root(x)
                if root not in storages.there:
                    if root not in made:
                        add(root, True)
                    net.add_edge((root, 1), (v.name, 0), capacity=math.inf)
    if SOURCE not in net or SINK not in net:
        return set()
    _, (_, beyond) = nx.minimum_cut(net, SOURCE, SINK)
    return {root for root in made if (root, 0) in beyond}
