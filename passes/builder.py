"""Builds graphs: fresh names, and the nodes that a pass appends."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .graph import Graph, Location, Node, Value, bare

COUNT = re.compile(r"_\d+$")


def unused(stem: str, taken: Collection[str]) -> str:
    """`stem`, or `stem_1`, `stem_2` ... if it is taken."""
    name, count = stem, 0
    while name in taken:
        count += 1
        name = f"{stem}_{count}"
    return name


@dataclass
class Builder:
    """Collects the nodes of a new graph, and gives fresh names."""

    taken: set[str]
    nodes: list[Node] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)  # the last one of each stem

    @classmethod
    def beside(cls, sources: Iterable[Value]) -> Builder:
        """A builder whose values are named unlike the sources."""
        return cls({v.name for v in sources})

    def name(self, wanted: str) -> str:
        """`wanted`, or `wanted_1`, `wanted_2` ... if it is taken; d_x_1 is the
        cotangent of x_1 alone, if there is one."""
        candidate = wanted
        if wanted in self.taken:
            stem = COUNT.sub("", wanted)
            count = self._counts.get(stem, 0)
            while {candidate, candidate.removeprefix("d_")} & self.taken:
                count += 1
                candidate = f"{stem}_{count}"
            self._counts[stem] = count
        self.taken.add(candidate)
        return candidate

    def value(self, wanted: str, shape: Iterable[int], dtype: torch.dtype) -> Value:
        """Returns a new value, named as wanted or close to it."""
        return Value(self.name(wanted), tuple(shape), dtype)

    def emit(
        self,
        op: str,
        args: tuple[Any, ...],
        shape: Iterable[int],
        dtype: torch.dtype,
        where: Location,
        name: str | None = None,
    ) -> Value:
        """Append a node with one result, and return the result."""
        wanted = name or bare(op)
        out = self.value(wanted, shape, dtype)
        self.nodes.append(Node(op, args, {}, (out,), where))
        return out


def needed_nodes(
    nodes: Sequence[Node],
    needed: set[str],
    counted: Callable[[Node], bool] = lambda node: False,
) -> list[Node]:
    """The nodes that `needed` depends on; their operands are added to it. counted:
    nodes that stay, whether or not their results are read."""
    kept = []
    for node in reversed(nodes):
        if counted(node) or any(v.name in needed for v in node.results):
            kept.append(node)
            needed.update(v.name for v in node.operands)
    return kept[::-1]


def prune(graph: Graph, counted: Callable[[Node], bool] = lambda node: False) -> Graph:
    """Drop nodes, buffers and constants that no output depends on."""
    needed = {v.name for v in graph.outputs}
    return replace(
        graph,
        nodes=tuple(needed_nodes(graph.nodes, needed, counted)),
        buffers=tuple(v for v in graph.buffers if v.name in needed),
        constants=tuple(v for v in graph.constants if v.name in needed),
    )


def find_reached(graph: Graph) -> set[str]:
    """Names of the values that the loss, its first output, sends a gradient to, if they
    take one: not behind a detach, or through what gives no real numbers."""
    reached = {graph.outputs[0].name}
    for node in reversed(graph.nodes):
        if node.op == "aten.detach.default":
            continue
        kinds = {v.dtype for v in node.results if v.name in reached}
        if any(kind.is_floating_point or kind.is_complex for kind in kinds):
            reached.update(v.name for v in node.operands)
    return reached


def with_values(graph: Graph, change: Callable[[Value], Value]) -> Graph:
    """The same graph with all its values changed."""

    def values(own: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(map(change, own))

    def changed(node: Node) -> Node:
        outs = tuple(v and change(v) for v in node.outs)
        return replace(node.substitute(change), outs=outs)

    return Graph(
        values(graph.inputs),
        values(graph.params),
        values(graph.buffers),
        values(graph.constants),
        tuple(map(changed, graph.nodes)),
        values(graph.outputs),
    ).verify()
