"""The graph of a model, made from that of one with few of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from .builder import Builder
from .graph import Graph, Node, Value
from .layers import (
    BEFORE,
    FIRST,
    Layered,
    NotAlike,
    Repeats,
    number_in,
    number_of,
    renumbered,
)


class Repeater:
    """Makes the graph of a whole model from that of the one with few layers.

    blocks: what the layers that repeat make, each time. origins: of each value of the
    graph what it is in that of few, so many blocks before. strides: by how much the
    number of an op grows from one block to the next.
    """

    def __init__(self, few: Layered, repeats: Repeats) -> None:
        self.few, self.repeats = few, repeats
        self.graph, self.parts = few.graph, few.parts
        if len(self.parts) != len(repeats.kept) + FIRST + 1:
            raise NotAlike
        self.copies = repeats.times - 2
        self.first = FIRST + repeats.first
        self.second = self.first + repeats.period  # what copies are made of
        self.end = self.second + repeats.period
        self.blocks = [
            [[*own] for own in few.made[start : start + repeats.period]]
            for start in (self.first, self.second)
        ]
        self.strides = self._strides()
        self.outputs: dict[str, Value] = {}  # of each layer, by name
        sources = {v.name for v in self.graph.sources}
        self.builder = Builder(sources | few.places.keys())
        self.constants = {v.name for v in self.graph.constants}
        fixed = [*(v.name for v in self.graph.inputs), *self.constants]
        self.origins = {name: (name, 0) for name in (*fixed, *few.places)}

    def whole(
        self,
        order: Iterable[str],
        wholes: Mapping[str, str] = {},
        outputs: Sequence[str] = (),
    ) -> Graph:
        """The graph. order: of the names that it has for parameters and buffers.
        wholes: of parameters that are parts of one of these, which. outputs: names of
        the last outputs of the few, of which each layer has some.

        Raises: NotAlike where the second time a layer is not what it is the first time.
        """
        for part in range(self.first, self.second):
            again = part + self.repeats.period
            if self.few.kind(part, self.first) != self.few.kind(again, self.second):
                raise NotAlike
        nodes = [node for part in self.parts[: self.end] for node in part]
        for copy in range(1, self.copies + 1):
            self.blocks.append([])
            for part in range(self.second, self.end):
                self.blocks[-1].append([])
                for node in self.parts[part]:
                    nodes.append(self.copy(node, part, copy))
                    self.blocks[-1][-1] += nodes[-1].results
        for part in range(self.end, len(self.parts)):
            nodes += (self.moved(node, part, self.copies) for node in self.parts[part])
        behind = len(self.parts) - 1
        places = {name: i for i, name in enumerate(order)}
        last = len(self.graph.outputs) - len(outputs)
        fixed, own = self.graph.outputs[:last], self.graph.outputs[last:]
        for name, v in zip(outputs, own, strict=True):
            self.outputs |= self._output(name, v)
        return Graph(
            self.graph.inputs,
            self.sources(self.graph.params, wholes, places),
            self.sources(self.graph.buffers, wholes, places),
            self.graph.constants,
            tuple(nodes),
            (
                *(self.now(v, behind, self.copies) for v in fixed),
                *self.outputs.values(),
            ),
        ).verify()

    def _output(self, name: str, v: Value) -> dict[str, Value]:
        """The copies of a layer's output in all layers, by name. Raises: NotAlike."""
        part = self._part(name)
        if self.few.places.get(v.name, (None,))[0] != part:
            raise NotAlike
        return {
            self.renamed(name, part, n): self.then(v.name, n) for n in self._times(part)
        }

    def of_layers(self, name: str) -> dict[str, Callable[[str], str]]:
        """A name of the few, as the whole has it: in each layer that there is; with how
        other names of the few's layer are there."""
        part = self._part(name)
        ways = {
            n: partial(self.renamed, part=part, copies=n) for n in self._times(part)
        }
        return {way(name): way for way in ways.values()}

    def _part(self, name: str) -> int:
        """The part that a name belongs to."""
        layer = number_in(self.repeats.path, name)
        return BEFORE if layer is None else FIRST + layer

    def _times(self, part: int) -> range:
        """How many blocks further on the whole model has copies of a part."""
        times = range(self.copies + 1) if part >= self.second else range(1)
        return times[-1:] if part >= self.end else times

    def moved(self, node: Node, part: int, copies: int) -> Node:
        """The node, `copies` blocks further on."""
        node = node.substitute(lambda v: self.now(v, part, copies))
        if (number := number_of(node)) is not None:
            node = node.with_args(number=number + copies * self.strides.get(node.op, 0))
        return node.in_module(self.renamed(node.location.module, part, copies))

    def copy(self, node: Node, part: int, copies: int) -> Node:
        """A copy of a layer's node, `copies` blocks further on."""
        node = self.moved(node, part, copies)
        outs = [v and replace(v, name=self.builder.name(v.name)) for v in node.outs]
        for new, old in zip(outs, node.outs, strict=True):
            if new and old:
                self.origins[new.name] = old.name, copies
        return replace(node, outs=tuple(outs))

    def now(self, v: Value, part: int, copies: int) -> Value:
        """The value that a part reads in place of `v`, `copies` blocks further on."""
        if v.name in self.few.places:
            return self.then(v.name, copies)
        if v.name in self.constants:  # by their values, whatever layer holds them
            return v
        return replace(v, name=self.renamed(v.name, part, copies))

    def then(self, name: str, copies: int) -> Value:
        """The value that is made in place of another, `copies` blocks further on."""
        place, i = self.few.places[name]
        if not copies or place <= FIRST or place >= self.end:
            return self.few.made[place][i]
        if place < self.first:
            raise NotAlike
        block, layer = divmod(place - self.first, self.repeats.period)
        return self.blocks[block + copies][layer][i]

    def renamed(self, name: str, part: int, copies: int) -> str:
        """The name that a part has for another, `copies` blocks further on."""
        path, number = self.repeats.path, number_in(self.repeats.path, name)
        if number is None:
            return name
        if FIRST + number >= self.end:
            copies = self.copies
        elif FIRST + number != part:
            return name
        return renumbered(path, name, number, number + copies * self.repeats.period)

    def sources(
        self, few: Sequence[Value], wholes: Mapping[str, str], places: Mapping[str, int]
    ) -> tuple[Value, ...]:
        """Parameters or buffers of all layers, from those of the few."""
        whole: list[tuple[int, Value]] = []
        for v in few:
            part, named = self._part(v.name), wholes.get(v.name, v.name)
            for n in self._times(part):
                new = replace(v, name=self.renamed(v.name, part, n))
                self.origins[new.name] = v.name, n
                whole.append((places[self.renamed(named, part, n)], new))
        return tuple(v for _, v in sorted(whole, key=lambda pair: pair[0]))

    def _strides(self) -> dict[str, int]:
        """Returns how many of each op with a number a block has. Raises: NotAlike."""
        strides: dict[str, int] = {}
        for part in range(self.first, self.second):
            again = self.parts[part + self.repeats.period]
            for one, other in zip(self.parts[part], again, strict=False):
                a, b = number_of(one), number_of(other)
                if a is None or b is None:
                    continue
                if strides.setdefault(one.op, b - a) != b - a:
                    raise NotAlike
        return strides
