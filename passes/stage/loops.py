"""loops: what repeats in a list of nodes, layer after layer, is written once.

Layers that are alike are found in the nodes themselves, not by their modules: a stretch
repeats if each of its nodes does what the one a period later does, on tensors of the
same shapes. So what runs ahead of its layer (a gather) or behind it (a scatter) is part
of the loop as well, and layers that alternate repeat in pairs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ..graph import LAYER, Node, Value


@dataclass(frozen=True)
class Varying:
    """A constant that each iteration has its own of."""

    values: tuple[int | float, ...]


@dataclass(frozen=True)
class Carried:
    """What one iteration hands to the next. value: its name in the body; first: what
    the first iteration reads; next: the value of the body that the next one reads."""

    value: Value
    first: Value
    next: Value


@dataclass(frozen=True)
class Given:
    """A value from outside that each iteration has its own of. value: its name in the
    body."""

    value: Value
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Loop:
    """Nodes that repeat.

    rows: the nodes themselves, by iteration. body: those of the first iteration, which
    read what is `carried` and `given` by the names that these have there, and constants
    that vary as `Varying`. layer: (first, step): the number of the layer that an
    iteration is about.
    """

    rows: tuple[tuple[Node, ...], ...]
    body: tuple[Node, ...]
    carried: tuple[Carried, ...]
    given: tuple[Given, ...]
    layer: tuple[int, int]

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def index(self) -> tuple[int, int]:
        """(first, step) of the number that tells iterations apart."""
        return self.layer if self.layer[1] else (0, 1)

    def instances(self) -> Iterator[tuple[str, Value, int]]:
        """(name of a value, its value in the body, iteration)."""
        for t, row in enumerate(self.rows):
            for own, node in zip(self.body, row, strict=True):
                for inner, v in zip(own.outs, node.outs, strict=True):
                    if v is not None and inner is not None:
                        yield v.name, inner, t

    def unrolled(self) -> list[Node]:
        return [node for row in self.rows for node in row]


Item = Node | Loop


def find_loops(nodes: Sequence[Node]) -> list[Item]:
    """The nodes in order, with those that repeat by layer as loops."""
    found: list[Item] = []
    start = 0
    for first, period, end in _stretches(nodes):
        begin = _turned(nodes, first, period, end)
        while begin + 2 * period <= end:
            rows = _rows(nodes, begin, period, end)
            loop, later = _loop(rows), _loop(rows[1:])
            if loop is None or (later is not None and later.count > loop.count):
                begin += period
                continue
            found += [*nodes[start:begin], loop]
            start = begin = begin + loop.count * period
    return [*found, *nodes[start:]]


def without_ends(loop: Loop, first: int, last: int) -> list[Item]:
    """The loop of some of the iterations, with the others before and after it."""
    inner = _loop(loop.rows[first:last])
    if inner is None or inner.count < last - first:
        return [loop]
    before, after = loop.rows[:first], loop.rows[last:]
    return [*chain(*before), inner, *chain(*after)]


# --- stretches of equal nodes -------------------------------------------------------


def _stretches(nodes: Sequence[Node]) -> list[tuple[int, int, int]]:
    """(begin, period, end) of what repeats, in order, none within another; what saves
    most is chosen first."""
    kinds: dict[Any, int] = {}
    keys = [kinds.setdefault(_kind(n), len(kinds)) for n in nodes]
    found: list[tuple[int, int, int]] = []
    waiting = [(0, len(nodes))]
    while waiting:
        first, last = waiting.pop()
        best = _longest(nodes, keys, first, last)
        if best is None:
            continue
        begin, period, end = best
        found.append(best)
        waiting += [(first, begin), (begin + (end - begin) // period * period, last)]
    return sorted(found)


def _longest(
    nodes: Sequence[Node], keys: Sequence[int], first: int, last: int
) -> tuple[int, int, int] | None:
    """Returns the stretch between two places that saves most."""
    seen: dict[int, int] = {}
    apart: Counter[int] = Counter()
    for i in range(first, last):
        if keys[i] in seen:
            apart[i - seen[keys[i]]] += 1
        seen[keys[i]] = i
    best: tuple[int, int, int] | None = None
    most = 0
    for period, times in sorted(apart.items()):
        if times < period // 4:
            continue
        for begin, end in _runs(keys, period, first, last):
            count = (end - begin) // period
            saved = (count - 1) * period
            if saved > most and _by_layer(nodes, begin, period):
                most = saved
                best = _aligned(nodes, begin, period, end), period, end
    return best


def _runs(
    keys: Sequence[int], period: int, first: int, last: int
) -> Iterator[tuple[int, int]]:
    """(begin, end) of the longest runs in which each is as the one a period later."""
    begin = first
    for i in range(first, last - period + 1):
        if i == last - period or keys[i] != keys[i + period]:
            if i - begin >= period:
                yield begin, i + period
            begin = i + 1


def _by_layer(nodes: Sequence[Node], begin: int, period: int) -> bool:
    """Whether a later repetition is of another layer than the first."""
    return any(
        _layers(nodes[i]) != _layers(nodes[i + period])
        for i in range(begin, begin + period)
    )


def _layers(node: Node) -> tuple[str, ...]:
    names = (v.name for v in node.operands if LAYER.search(v.name))
    return (node.location.layer, *names)


def _aligned(nodes: Sequence[Node], begin: int, period: int, end: int) -> int:
    """The first place where a layer begins, if that loses no repetition."""
    for i in range(begin, begin + (end - begin) % period + 1):
        layer = nodes[i].location.layer
        if layer and (i == 0 or nodes[i - 1].location.layer != layer):
            return i
    return begin


def _kind(node: Node) -> Any:
    """Equal for nodes that may be the same statement of a loop."""
    outs = tuple(None if v is None else (v.shape, v.dtype) for v in node.outs)
    return node.op, _shape((node.args, tuple(sorted(node.kwargs.items())))), outs


def _shape(tree: Any) -> Any:
    """An argument without what may differ between iterations."""
    if isinstance(tree, Value):
        name = LAYER.sub("#", tree.name) if _held(tree) else ""
        return name, tree.shape, tree.dtype
    if isinstance(tree, (tuple, list)):
        return tuple([_shape(item) for item in tree])
    if isinstance(tree, (int, float)) and not isinstance(tree, bool):
        return type(tree)
    return tree


def _held(v: Value) -> bool:
    """Whether it is a parameter, a buffer or a gradient of a layer, by its name."""
    return LAYER.search(v.name) is not None


def _rows(
    nodes: Sequence[Node], begin: int, period: int, end: int
) -> tuple[tuple[Node, ...], ...]:
    places = range(begin, end - period + 1, period)
    return tuple(tuple(nodes[i : i + period]) for i in places)


def _turned(nodes: Sequence[Node], begin: int, period: int, end: int) -> int:
    """Where rows are to begin: there, or later by less than a row, so that what a row
    reads is of one layer, and made in no row but the one before.

    What is gathered ahead and scattered behind runs at the edges of other layers.
    """
    places = range(begin, min(begin + period, end - 2 * period + 1))
    return min(
        places,
        key=lambda at: (not _fits(nodes, at, period, end), _strange(nodes, at, period)),
        default=begin,
    )


def _fits(nodes: Sequence[Node], at: int, period: int, end: int) -> bool:
    """Whether the first few rows are a loop, or those after the first one."""
    rows = _rows(nodes, at, period, min(end, at + 5 * period))
    return any(
        len(own) > 1 and _fitting(own, _made(own)) == len(own)
        for own in (rows, rows[1:])
    )


def _strange(nodes: Sequence[Node], at: int, period: int) -> int:
    """How many nodes of a row read what other rows have not made, for another layer
    than most."""
    rows = nodes[at : at + 2 * period]
    made = {v.name for n in rows for v in n.results}
    layers = Counter(
        n.location.layer
        for n in rows[period:]
        if any(v.name not in made and not _held(v) for v in n.operands)
    )
    return layers.total() - max(layers.values(), default=0)


# --- one loop -----------------------------------------------------------------------


def _loop(rows: tuple[tuple[Node, ...], ...]) -> Loop | None:
    """The loop that the first rows make, as many as fit together; None if not two."""
    if len(rows) < 2:
        return None
    made = _made(rows)
    count = _fitting(rows, made)
    if count < 2:
        return None
    rows = rows[:count]
    return _Body(rows, made).loop()


def _made(rows: tuple[tuple[Node, ...], ...]) -> dict[str, tuple[int, int, int]]:
    """Value -> its row, node there, and result of that."""
    return {
        v.name: (t, o, j)
        for t, row in enumerate(rows)
        for o, node in enumerate(row)
        for j, v in enumerate(node.outs)
        if v is not None
    }


def _fitting(
    rows: tuple[tuple[Node, ...], ...], made: dict[str, tuple[int, int, int]]
) -> int:
    """How many rows read what they make themselves, or the row before, alike; and are
    of layers at even distances."""
    numbers = [_number(row) for row in rows]
    second = rows[1]
    for t, row in enumerate(rows[1:], 1):
        if numbers[t] - numbers[t - 1] != numbers[1] - numbers[0]:
            return t
        for o, node in enumerate(row):
            before, like = rows[t - 1][o].operands, second[o].operands
            for v, first, w in zip(node.operands, before, like, strict=True):
                at, from_ = made.get(v.name), made.get(w.name)
                if _way(at, t) != _way(from_, 1):
                    return t
                # What one row makes itself, or has from outside, all do; what it has of
                # the row before, the first has from outside.
                far = 0 if at is None else t - at[0]
                if far > 1:
                    return t
                own = None if far else _way(at, t)
                if t == 1 and _way(made.get(first.name), 0) != own:
                    return t
    return len(rows)


def _way(at: tuple[int, int, int] | None, t: int) -> tuple[int, int, int] | None:
    return None if at is None else (t - at[0], *at[1:])


def _number(row: Iterable[Node]) -> int:
    """Returns the number of the layer that a row is about."""
    for node in row:
        for text in (node.location.module, *(v.name for v in node.operands)):
            if match := LAYER.search(text):
                return int(match[1])
    return 0


class _Body:
    """Builds the body of a loop from its rows."""

    def __init__(
        self,
        rows: tuple[tuple[Node, ...], ...],
        made: dict[str, tuple[int, int, int]],
    ) -> None:
        self.rows, self.made = rows, made
        # Names of values in the body are those of no other loop.
        first = next(v for n in rows[0] for v in (*n.results, *n.operands))
        self.tag = f"{first.name}@"
        self.carried: dict[tuple[str, str], Carried] = {}
        self.given: dict[tuple[str, ...], Given] = {}

    def loop(self) -> Loop:
        body = tuple(self.node(o) for o in range(len(self.rows[0])))
        first, second = _number(self.rows[0]), _number(self.rows[1])
        carried, given = tuple(self.carried.values()), tuple(self.given.values())
        return Loop(self.rows, body, carried, given, (first, second - first))

    def node(self, o: int) -> Node:
        nodes = [row[o] for row in self.rows]
        columns = zip(*(n.operands for n in nodes), strict=True)
        values = iter([self.value(own) for own in columns])
        args = _merged([n.args for n in nodes], values)
        keys = nodes[0].kwargs.keys()
        kwargs = {k: _merged([n.kwargs[k] for n in nodes], values) for k in keys}
        # What runs at the edge of a layer belongs to another module in the first one.
        outs = tuple(v and _inner(v) for v in nodes[0].outs)
        return Node(nodes[0].op, args, kwargs, outs, nodes[1].location)

    def value(self, column: tuple[Value, ...]) -> Value:
        """What stands for an operand in the body."""
        first = column[0]
        at = self.made.get(column[1].name)
        if at is not None and at[0] <= 1:
            _, o, j = at
            made = self.rows[0][o].outs[j]
            assert made is not None
            source = _inner(made)
            if at[0] == 1:
                return source
            key = (first.name, source.name)
            if key not in self.carried:
                d = "d_" if source.name.startswith("d_") else ""
                inner = replace(source, name=f"{d}x@{self.tag}{len(self.carried)}")
                self.carried[key] = Carried(inner, first, source)
            return self.carried[key].value
        if all(v == first for v in column):
            return first
        names = tuple(v.name for v in column)
        if names not in self.given:
            inner = replace(first, name=f"{first.name}@{self.tag}{len(self.given)}")
            self.given[names] = Given(inner, column)
        return self.given[names].value


def _inner(v: Value) -> Value:
    """What the body has for a value of the first iteration."""
    return replace(v, name=f"{v.name}@")


def _merged(trees: list[Any], values: Iterator[Value]) -> Any:
    """An argument in all iterations -> that of the body."""
    first = trees[0]
    if isinstance(first, Value):
        return next(values)
    if isinstance(first, (tuple, list)):
        columns = zip(*trees, strict=True)
        return tuple([_merged(list(own), values) for own in columns])
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        same = all(x == first or (x != x and first != first) for x in trees)
        return first if same else Varying(tuple(trees))
    return first


# --- series of numbers --------------------------------------------------------------


def series(values: Sequence[int | float]) -> tuple[int, int] | None:
    """(first, step) of whole numbers at even distances."""
    if not all(isinstance(v, int) for v in values):
        return None
    first, step = int(values[0]), int(values[1] - values[0])
    even = all(v == first + step * t for t, v in enumerate(values))
    return (first, step) if even else None


NUMBER = re.compile(r"(\d+)")


def numbered(names: Sequence[str]) -> list[str | tuple[int, int]] | None:
    """Names that differ in numbers, which make series: the pieces, and the series."""
    split = [NUMBER.split(name) for name in names]
    if len({len(parts) for parts in split}) > 1:
        return None
    found: list[str | tuple[int, int]] = []
    for column in zip(*split, strict=True):
        if len(set(column)) == 1:
            found.append(column[0])
            continue
        if not all(part.isdigit() and str(int(part)) == part for part in column):
            return None
        if (one := series([int(part) for part in column])) is None:
            return None
        found.append(one)
    return found
