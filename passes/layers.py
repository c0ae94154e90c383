"""Layers that do the same: a graph, layer by layer, and what repeats in it.

Who works with few of them, what says that they are alike, and how many are left:

    find_repeats       what layers call, by a run without data: two times, to capture
    repeat_layers      makes the graph of all layers from one of few
    few_layers         the nodes of a captured graph: four times, to lower
    find_loops         the nodes of a stage, as functions: a loop of them, to emit
    shorten            modules, and what they call: three times, for a search to price
    choose_layers      what a plan does with them: one of each kind, to be proved
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .builder import prune
from .graph import Graph, Node, Value, map_values
from .ops.random import awaits_number

BEFORE, FIRST = 0, 1  # the parts before the layers, and of the first of them
NUMBER = "number"  # an argument that tells apart the ops of a model that draw numbers


class NotAlike(Exception):
    """Layers that differ in the graph, or are not in turn."""


@dataclass(frozen=True)
class Repeats:
    """A list of `total` layers of which those from `first` on are the same `period`
    layers so many `times`. The model with few layers has these twice."""

    path: str
    total: int
    first: int
    period: int
    times: int

    @property
    def spared(self) -> int:
        return (self.times - 2) * self.period

    @property
    def kept(self) -> tuple[int, ...]:
        """The number of each layer of the model with few."""
        behind = self.first + self.period + self.spared
        return *range(self.first + self.period), *range(behind, self.total)


@dataclass(frozen=True)
class Layers:
    """The layers of a model. path: of their list. period: of the pattern that repeats
    (in layers); kept: of `total`, how many the shortened model has. before: unlike
    layers before the pattern, which its first repeat has too. After the last repeat
    there may be the first few layers of another one, which count as its end."""

    path: str
    total: int
    period: int
    kept: int
    before: int = 0

    @property
    def repeats(self) -> int:
        return (self.total - self.before) // self.period

    @property
    def kept_repeats(self) -> int:
        """How many the shortened model has."""
        return (self.kept - self.before) // self.period

    @property
    def starts(self) -> tuple[str, ...]:
        """Module paths at which the repeats of the pattern begin."""
        later = (self.before + i * self.period for i in range(1, self.repeats))
        return tuple(f"{self.path}.{i}" for i in (0, *later))

    def repeat_of(self, module: str) -> int | None:
        """The repeat that a module path of the shortened model lies in."""
        number = number_in(self.path, module)
        if number is None:
            return None
        repeat = max(0, number - self.before) // self.period
        return min(repeat, self.kept_repeats - 1)


def longest(path: str, layers: Sequence[Hashable]) -> Repeats | None:
    """The repetition that spares the most layers; layers are compared by kind."""
    known: dict[Hashable, int] = {}
    kinds = [known.setdefault(layer, len(known)) for layer in layers]
    best: Repeats | None = None
    for period in range(1, len(kinds) // 3 + 1):
        start = 0
        for i in range(period, len(kinds) + 1):
            if i < len(kinds) and kinds[i] == kinds[i - period]:
                continue
            times = (i - start) // period
            one = Repeats(path, len(kinds), start, period, times)
            if times > 2 and (best is None or one.spared > best.spared):
                best = one
            start = i - period + 1
    return best


def number_in(path: str, name: str) -> int | None:
    """The number of the layer of a list that a name is in; None outside of it."""
    start, _, rest = name.partition(f"{path}.")
    number = rest.partition(".")[0]
    return int(number) if not start and number.isdecimal() else None


def renumbered(path: str, name: str, layer: int, other: int | str) -> str:
    """A name in one layer, renamed to another one; other names stay."""
    prefix = f"{path}.{layer}"
    if not f"{name}.".startswith(f"{prefix}."):
        return name
    return f"{path}.{other}{name.removeprefix(prefix)}"


class Layered:
    """A graph by the layers of a list.

    parts: nodes before the layers, of each layer and what comes behind it, and after
    the last. made: the values of each. places: of each value the part that makes it,
    and its number there.
    note: what there is to know of a value beside the graph.
    Raises: NotAlike where layers are not in turn.
    """

    def __init__(
        self,
        graph: Graph,
        path: str,
        literals: Mapping[str, torch.Tensor],
        note: Callable[[Value], Hashable] = lambda v: None,
    ) -> None:
        self.graph, self.path, self.note = prune(graph, awaits_number), path, note
        self.parts = _parts(self.graph, path)
        self.made = [[v for node in part for v in node.results] for part in self.parts]
        self.places = {
            v.name: (part, i)
            for part, values in enumerate(self.made)
            for i, v in enumerate(values)
        }
        equal: dict[str, str] = {}
        for name, x in literals.items():
            same = (k for k in equal.values() if _are_same(x, literals[k]))
            equal[name] = next(same, name)
        self.equal = equal  # literal -> the first one that is the same
        self.named = cache(self._named)

    def kind(self, part: int, known: int = 0) -> Hashable:
        """A key of a layer's work, equal for layers that do the same.

        known: values of a part before this one count as one.
        """
        return tuple(self._described(node, part, known) for node in self.parts[part])

    def _described(self, node: Node, part: int, known: int) -> Hashable:
        def describe(v: Value) -> Hashable:
            if v.name not in self.places:
                return self.equal.get(v.name) or self.named(v, part)
            place, i = self.places[v.name]
            if place <= FIRST:
                return "part", place, i
            return "back", part - place, i if place >= known else 0

        args, kwargs = node.args, node.kwargs
        if number_of(node) is not None:
            args = node.with_args(number=None).args
        read = _hashable(map_values(describe, (args, kwargs)))
        outs = tuple(v and (v.shape, v.dtype, self.note(v)) for v in node.outs)
        where = renumbered(self.path, node.location.module, part - FIRST, "*")
        return node.op, read, outs, where, node.location.source

    def _named(self, v: Value, part: int) -> Hashable:
        """A source by its name in the part's own layer."""
        name = renumbered(self.path, v.name, part - FIRST, "*")
        return name, v.shape, v.dtype, self.note(v)


def number_of(node: Node) -> int | None:
    """The number of a node that draws random numbers."""
    return node.arg(NUMBER) if node.op.startswith("autopar.") else None


def _parts(graph: Graph, path: str) -> list[list[Node]]:
    """Nodes by part. Raises: NotAlike."""
    parts: list[list[Node]] = [[]]
    numbers = [number_in(path, n.location.module) for n in graph.nodes]
    last = max((i for i, number in enumerate(numbers) if number is not None), default=0)
    for i, (node, number) in enumerate(zip(graph.nodes, numbers, strict=True)):
        if number is not None and number != len(parts) - 1 - FIRST:
            if number != len(parts) - FIRST:
                raise NotAlike
            parts.append([])
        if i == last + 1:
            parts.append([])
        parts[-1].append(node)
    return parts


def _are_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x, y)


def _hashable(tree: Any) -> Hashable:
    """Arguments such that 1, 1.0 and True are three things."""
    if isinstance(tree, tuple):
        return tuple(map(_hashable, tree))
    if isinstance(tree, Mapping):
        return tuple((k, _hashable(x)) for k, x in tree.items())
    return repr(tree) if isinstance(tree, float) else (type(tree), tree)
