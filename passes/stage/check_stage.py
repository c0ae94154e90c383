"""check_stage: what a rank runs of a stage fits together, part by part.

The parts are graphs of their own: the forward runs for several microbatches before the
backward does for the first, and reads what is made once a step. What a part writes over
is its own, and is not read again by its old name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType

from ..dims.name_dims import Dims
from ..graph import Graph, InvalidGraph, Node, Value, values_in
from ..ops.memory import ADD, ADD_EACH, find_owners, is_in_place
from ..shard.sharding import Sharding

Parts = Mapping[str, Sequence[Node]]


def part_graphs(
    parts: Parts, params: Iterable[Value], ends: Iterable[Value]
) -> list[tuple[str, Graph]]:
    """Returns the graph of each part that is not empty. Inputs: values of other parts.
    Outputs: values that others read, and those of `ends`."""
    held = {v.name for v in params}
    wanted = {v.name for v in ends}
    read = {name: values_in([n.operands for n in own]) for name, own in parts.items()}
    by_part = {name: {v.name: v for v in values} for name, values in read.items()}
    graphs = []
    for name, nodes in parts.items():
        made = {v.name: v for n in nodes for v in n.results}
        outer = [v for v in by_part[name].values() if v.name not in made]
        others = wanted.union(*(by_part[other] for other in parts if other != name))
        if nodes:
            graph = Graph(
                tuple(v for v in outer if v.name not in held),
                tuple(v for v in outer if v.name in held),
                (),
                (),
                tuple(nodes),
                tuple(v for n, v in made.items() if n in others),
            )
            graphs.append((name, graph))
    return graphs


def check_parts(
    graphs: Iterable[tuple[str, Graph]],
    readable: Mapping[str, Iterable[Value]],
    sums: Collection[str],
    residuals: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Checks each part alone, and that it reads only what is there when it runs.

    readable: for each part, values from outside. sums: names of those that parts may
    add to: the buffers of gradients, and cotangents that are received for one backward.
    residuals: what the backward may write over, see `passes.stage.reuse.own_residuals`.
    Raises: InvalidGraph.
    """
    for name, graph in graphs:
        graph.verify()
        there = {v.name: v for v in readable[name]}
        for v in graph.sources:
            if there.get(v.name) != v:
                raise InvalidGraph(f"the {name} reads {v} {v.type}, which is not there")
        check_writes(graph.nodes, sums, residuals if name == "backward" else {})


def check_writes(
    nodes: Sequence[Node],
    sums: Collection[str],
    residuals: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Checks that what is written over belongs to these nodes, or was kept for them
    alone, or is a sum that they may add to, and is not read by its old name. Raises:
    InvalidGraph.
    """
    owners = find_owners(nodes, {name: name for name in sums} | dict(residuals))
    names: dict[str, set[str]] = {}  # memory -> the values in it so far
    for name, memory in residuals.items():
        names.setdefault(memory, set()).add(name)
    gone: set[str] = set()
    for node in nodes:
        for v in node.operands:
            if v.name in gone:
                raise InvalidGraph(f"{node} reads {v}, which was written over")
        if node.op in (ADD, ADD_EACH):
            for v in values_in(node.arg("into") or node.arg("sums")):
                if v.name not in owners:
                    raise InvalidGraph(f"{node} adds to {v}, which is not its own")
        elif is_in_place(node):
            root = owners.get(node.operands[0].name)
            if root is None:
                raise InvalidGraph(f"{node} writes over what is not its own")
            gone |= names.pop(root, set())
        for v in node.results:
            names.setdefault(owners.get(v.name, v.name), set()).add(v.name)


def check_shapes(
    nodes: Iterable[Node], dims: Mapping[str, Dims], shardings: Mapping[str, Sharding]
) -> None:
    """Checks the shapes of a rank against the named dims: what no axis splits is there
    whole. Raises: InvalidGraph."""
    for v in (v for node in nodes for v in node.results if v.name in dims):
        own = zip(v.shape, dims[v.name], shardings[v.name].slots, strict=True)
        for extent, factors, slots in own:
            whole = prod(d.size for d in factors)
            if extent > whole or (not any(slots) and extent != whole):
                raise InvalidGraph(f"{v} is {v.type}, and its dims are {dims[v.name]}")
