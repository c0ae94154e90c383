"""order_tables: what a forward makes of its batch and buffers alone, in the order in
which it is first read.

Positions, masks and rotary tables are often made in a loop over a set, as of the kinds
of a model's layers: a set of strings has another order in every process, and so would
the text of a program.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...builder import COUNT
from ...graph import Graph, Node, Value
from ...ops.random import awaits_number


def order_tables(graph: Graph) -> tuple[Graph, dict[str, str]]:
    """The graph, and former name -> name of each value that has another now.

    Nodes that depend on no parameter change places among themselves alone, and stay in
    their layer: else layers would not be alike.
    """
    tables = _tables(graph)
    read = _first_read(graph, tables)
    order = iter(sorted(tables, key=lambda i: (tables[i], read[i])))
    nodes = [graph.nodes[next(order)] if i in tables else n for i, n in _rows(graph)]
    names = _names([graph.nodes[i] for i in tables], [nodes[i] for i in tables])
    if not names:
        return graph, names

    def named(v: Value) -> Value:
        return replace(v, name=names[v.name]) if v.name in names else v

    nodes = [
        replace(n.substitute(named), outs=tuple(v and named(v) for v in n.outs))
        for n in nodes
    ]
    outputs = tuple(map(named, graph.outputs))
    return replace(graph, nodes=tuple(nodes), outputs=outputs).verify(), names


def _rows(graph: Graph) -> list[tuple[int, Node]]:
    return list(enumerate(graph.nodes))


def _tables(graph: Graph) -> dict[int, int]:
    """Places of the nodes that read nothing which depends on a parameter or on chance,
    in order; and how often another layer began before."""
    others = {v.name for v in graph.params}
    tables: dict[int, int] = {}
    layer, begun = "", 0
    for i, node in _rows(graph):
        if node.location.layer != layer:
            layer, begun = node.location.layer, begun + 1
        if awaits_number(node) or any(v.name in others for v in node.operands):
            others.update(v.name for v in node.results)
        else:
            tables[i] = begun
    return tables


def _first_read(graph: Graph, tables: Collection[int]) -> dict[int, int]:
    """Position of a table's node -> that of the first other node that depends on it."""
    read: dict[str, int] = {v.name: len(graph.nodes) for v in graph.outputs}
    places: dict[int, int] = {}
    for i, node in reversed(_rows(graph)):
        place = i
        if i in tables:
            known = [read[v.name] for v in node.results if v.name in read]
            place = places[i] = min(known, default=len(graph.nodes))
        for v in node.operands:
            read[v.name] = min(place, read.get(v.name, place))
    return places


def _names(before: list[Node], after: list[Node]) -> dict[str, str]:
    """Names with a number are dealt out anew: the first `mul` is `mul` again."""
    free: dict[str, list[str]] = {}
    for v in (v for node in before for v in node.results):
        free.setdefault(COUNT.sub("", v.name), []).append(v.name)
    names = {
        v.name: free[COUNT.sub("", v.name)].pop(0)
        for node in after
        for v in node.results
    }
    return {old: new for old, new in names.items() if old != new}
