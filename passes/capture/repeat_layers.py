"""The graph of a model, made from that of one with few of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..builder import Builder, prune
from ..capture.called import BEFORE, FIRST
from ..capture.find_repeats import Repeats
from ..graph import Graph, Location, Node, Value, map_values

Named = Callable[..., Iterator[tuple[str, torch.Tensor]]]


class NotAlike(Exception):
    """Layers that differ in the graph, though they call the same."""


class Repeater:
    """Makes the graph of a whole model from that of the one with few layers.

    parts: nodes before the layers, of each layer and what comes behind it, and after
    the last. places: of each value the part that makes it, and its number there.
    blocks: what the layers that repeat make, each time. copied: new value -> the one
    that it is a copy of.
    """

    def __init__(
        self, graph: Graph, repeats: Repeats, literals: Mapping[str, torch.Tensor]
    ) -> None:
        self.graph, self.repeats, self.literals = graph, repeats, literals
        self.builder = Builder({v.name for v in graph.sources} | set(graph.producers()))
        self.parts = _parts(graph, repeats)
        self.places = {
            v.name: (part, i)
            for part, nodes in enumerate(self.parts)
            for i, v in enumerate(_made(nodes))
        }
        self.first = FIRST + repeats.first
        self.second = self.first + repeats.period  # what copies are made of
        self.end = self.second + repeats.period
        self.blocks = [
            [_made(self.parts[part]) for part in range(start, start + repeats.period)]
            for start in (self.first, self.second)
        ]
        self.copied: dict[str, str] = {}

    def whole(self, model: nn.Module) -> Graph:
        """The graph; what it reads of the model is in that one's order. Raises:
        NotAlike."""
        for part in range(self.first, self.second):
            self.check(part)
        copies = self.repeats.times - 2
        nodes = [node for part in self.parts[: self.end] for node in part]
        for copy in range(1, copies + 1):
            self.blocks.append([])
            for part in range(self.second, self.end):
                self.blocks[-1].append([])
                for node in self.parts[part]:
                    nodes.append(self.renewed(self.moved(node, part, copy)))
                    self.blocks[-1][-1] += nodes[-1].results
        for part in range(self.end, len(self.parts)):
            nodes += (self.moved(node, part, copies) for node in self.parts[part])
        behind = len(self.parts) - 1
        return Graph(
            self.graph.inputs,
            self.sources(self.graph.params, model.named_parameters),
            self.sources(self.graph.buffers, model.named_buffers),
            self.graph.constants,
            tuple(nodes),
            tuple(self.now(v, behind, copies) for v in self.graph.outputs),
        ).verify()

    def moved(self, node: Node, part: int, copies: int) -> Node:
        """A node as it is so many blocks further on."""
        moved = node.substitute(lambda v: self.now(v, part, copies))
        module = self.renamed(node.location.module, part - FIRST, copies)
        return replace(moved, location=Location(module, node.location.source))

    def now(self, v: Value, part: int, copies: int) -> Value:
        """What a part that is so many blocks further on reads in place of a value."""
        if v.name not in self.places:
            return replace(v, name=self.renamed(v.name, part - FIRST, copies))
        made, i = self.places[v.name]
        if made <= FIRST or made >= self.end:
            return v
        if made < self.first:
            raise NotAlike
        block, layer = divmod(made - self.first, self.repeats.period)
        return self.blocks[block + copies][layer][i]

    def renamed(self, name: str, layer: int, copies: int) -> str:
        """A name in a layer, as it is so many blocks further on."""
        path, by = f"{self.repeats.path}.{layer}", copies * self.repeats.period
        if by and f"{name}.".startswith(f"{path}."):
            return f"{self.repeats.path}.{layer + by}{name.removeprefix(path)}"
        return name

    def renewed(self, node: Node) -> Node:
        """The node, with results of its own."""
        copies = [v and replace(v, name=self.builder.name(v.name)) for v in node.outs]
        for copy, v in zip(copies, node.outs, strict=True):
            if copy and v:
                self.copied[copy.name] = v.name
        return replace(node, outs=tuple(copies))

    def sources(self, few: Sequence[Value], named: Named) -> tuple[Value, ...]:
        """Parameters or buffers of all layers, from those of the few."""
        copies = self.repeats.times - 2
        sources: dict[str, Value] = {}
        for v in few:
            layer = number_in(self.repeats.path, v.name)
            part = BEFORE if layer is None else FIRST + layer
            times = range(copies + 1) if part >= self.second else range(1)
            for n in times[-1:] if part >= self.end else times:
                name = self.renamed(v.name, part - FIRST, n)
                sources[name] = replace(v, name=name)
        order = [name for name, _ in named(remove_duplicate=False)]
        return tuple(sources[name] for name in order if name in sources)

    def check(self, part: int) -> None:
        """The second time a layer is what it is the first time. Raises: NotAlike."""
        again = part + self.repeats.period
        if len(self.parts[part]) != len(self.parts[again]):
            raise NotAlike
        for one, other in zip(self.parts[part], self.parts[again], strict=True):
            if self.described(one, part, 0) != self.described(other, again, 1):
                raise NotAlike

    def described(self, node: Node, part: int, block: int) -> tuple[Any, ...]:
        """A node but for the names that it has in this block."""
        period = self.repeats.period

        def describe(v: Value) -> Any:
            if v.name in self.literals:
                return "constant", self._first_equal(v.name)
            if v.name not in self.places:
                return self.renamed(v.name, part - FIRST, -block)
            made, i = self.places[v.name]
            if made <= FIRST:
                return "part", made, i
            # What layers before the first that repeats make has numbers of its own.
            return "back", part - made, i if made - block * period >= self.first else 0

        arguments = map_values(describe, (node.args, dict(node.kwargs)))
        outs = tuple(v and (v.shape, v.dtype) for v in node.outs)
        return node.op, arguments, outs, node.location.source

    def _first_equal(self, name: str) -> str:
        """The first constant that is the same as this one."""
        x = self.literals[name]
        return next(
            k
            for k, y in self.literals.items()
            if x.dtype == y.dtype and torch.equal(x, y)
        )


def number_in(path: str, name: str) -> int | None:
    """The number of the layer of a list in which a name is; None outside of it."""
    start, _, rest = name.partition(f"{path}.")
    number = rest.partition(".")[0]
    return int(number) if not start and number.isdecimal() else None


def _parts(graph: Graph, repeats: Repeats) -> list[list[Node]]:
    """Nodes by part. Raises: NotAlike where layers are not in turn."""
    parts: list[list[Node]] = [[]]
    nodes = prune(graph).nodes  # caches of layers, which none reads, differ
    numbers = [number_in(repeats.path, n.location.module) for n in nodes]
    last = max((i for i, number in enumerate(numbers) if number is not None), default=0)
    for i, (node, number) in enumerate(zip(nodes, numbers, strict=True)):
        if number is not None and number != len(parts) - 1 - FIRST:
            if number != len(parts) - FIRST:
                raise NotAlike
            parts.append([])
        if i == last + 1:
            parts.append([])
        parts[-1].append(node)
    if len(parts) != len(repeats.kept) + FIRST + 1:
        raise NotAlike
    return parts


def _made(nodes: Sequence[Node]) -> list[Value]:
    return [v for node in nodes for v in node.results]
