"""One loop of rows of nodes that are alike, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..graph import LAYER, Node, Value
from ..stage.loop import Carried, Loop, Row, Scanned, Varying, series

Place = tuple[int, int, int]  # of a value: its row, node there, and result of that


def loop_of(rows: Sequence[tuple[Node, ...]]) -> Loop | None:
    """The loop that the first rows make, as many as fit together; None if not two."""
    if len(rows) < 2:
        return None
    count = fitting(rows)
    return loop_of_all(rows[:count]) if count > 1 else None


def loop_of_all(rows: Sequence[Row], tables: Collection[str] = ()) -> Loop | None:
    """The loop of all rows, of which the first and the last may be without some nodes;
    None if they do not fit together. tables: names of what is there before it, for each
    iteration by its number."""
    some = [o for o in range(len(rows[0])) if any(row[o] for row in rows)]
    rows = [tuple(row[o] for o in some) for row in rows]
    try:
        return _Body(tuple(rows), made_by(rows), tables).loop()
    except _Unfit:
        return None


def made_by(rows: Sequence[Row]) -> dict[str, Place]:
    """Returns where each value is produced: row, node in it, output of that."""
    return {
        v.name: (t, o, j)
        for t, row in enumerate(rows)
        for o, node in enumerate(row)
        for j, v in enumerate(node.outs if node else ())
        if v is not None
    }


def held(v: Value) -> bool:
    """Whether it is a parameter, a buffer or a gradient of a layer, by its name."""
    return LAYER.search(v.name) is not None


def number(row: Iterable[Node | None]) -> int:
    """Returns the number of the layer that a row is about."""
    for node in row:
        for text in (
            (node.location.module, *(v.name for v in node.operands)) if node else ()
        ):
            if match := LAYER.search(text):
                return int(match[1])
    return 0


def fitting(rows: Sequence[tuple[Node, ...]]) -> int:
    """How many rows read what they make themselves, or the row before, alike; and are
    of layers at even distances."""
    made = made_by(rows)
    numbers = [number(row) for row in rows]
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


def _way(at: Place | None, t: int) -> Place | None:
    return None if at is None else (t - at[0], *at[1:])


class _Unfit(Exception):
    """Rows that are no loop."""


class _Body:
    """Builds the body of a loop from its rows."""

    def __init__(
        self, rows: tuple[Row, ...], made: dict[str, Place], tables: Collection[str]
    ) -> None:
        self.rows, self.made, self.tables = rows, made, tables
        # Names of values in the body are those of no other loop.
        nodes = (node for row in rows for node in row if node is not None)
        first = next(v for n in nodes for v in (*n.results, *n.operands))
        self.tag = f"{first.name}@"
        self.carried: dict[tuple[str, str], Carried] = {}
        self.scanned: dict[tuple[str, ...], Scanned] = {}

    def loop(self) -> Loop:
        body = tuple(self.node(o) for o in range(len(self.rows[0])))
        carried, scanned = tuple(self.carried.values()), tuple(self.scanned.values())
        return Loop(self.rows, body, carried, scanned, self.layer())

    def layer(self) -> tuple[int, int]:
        """(first, step) of the numbers of layers: of nodes that all rows have."""
        whole = [o for o in range(len(self.rows[0])) if all(r[o] for r in self.rows)]
        numbers = [number(row[o] for o in whole) for row in self.rows]
        line = series(numbers)
        if line is None:
            raise _Unfit
        return line

    def node(self, o: int) -> Node:
        own = [(t, node) for t, row in enumerate(self.rows) if (node := row[o])]
        times, nodes = [t for t, _ in own], [node for _, node in own]
        if times != list(range(times[0], times[-1] + 1)):
            raise _Unfit
        columns = zip(*(n.operands for n in nodes), strict=True)
        values = iter([self.value(times, column) for column in columns])
        args = _merged([n.args for n in nodes], values, times[0])
        keys = nodes[0].kwargs.keys()
        kwargs = {
            k: _merged([n.kwargs[k] for n in nodes], values, times[0]) for k in keys
        }
        # What runs at the edge of a layer belongs to another module in the first one.
        outs = tuple(v and inner(v) for v in nodes[0].outs)
        where = self.where(times, nodes)
        return Node(nodes[0].op, args, kwargs, outs, where)

    def where(self, times: Sequence[int], nodes: Sequence[Node]) -> Any:
        """Where a node comes from in the second iteration."""
        if 1 in times:
            return nodes[times.index(1)].location
        return nodes[0].location

    def value(self, times: Sequence[int], column: Sequence[Value]) -> Value:
        """What stands for an operand in the body. times: the iterations that read it.
        Raises _Unfit."""
        ways = {
            _way(self.made.get(v.name), t) for t, v in zip(times, column, strict=True)
        }
        if times[0] == 0 and len(times) > 1:  # it may have of outside what others carry
            first = _way(self.made.get(column[0].name), 0)
            rest = {
                _way(self.made.get(v.name), t)
                for t, v in zip(times[1:], column[1:], strict=True)
            }
            if first is None and len(rest) == 1 and (way := rest.pop()) and way[0] == 1:
                return self.carry(column[0], way)
        if len(ways) > 1:
            raise _Unfit
        (way,) = ways
        if way is None:
            return self.outside(times, column)
        if way[0] > 1:
            raise _Unfit
        return self.carry(None, way) if way[0] else self.source(way)

    def source(self, way: Place) -> Value:
        """The value of the body that a node makes."""
        _, o, j = way
        made = next(node for row in self.rows if (node := row[o])).outs[j]
        if made is None:
            raise _Unfit
        return inner(made)

    def carry(self, first: Value | None, way: Place) -> Value:
        source = self.source(way)
        key = (first.name if first else "", source.name)
        if key not in self.carried:
            d = "d_" if source.name.startswith("d_") else ""
            called = f"{d}x" if first else source.name.partition("@")[0]
            name = f"{called}@{self.tag}{len(self.carried)}"
            self.carried[key] = Carried(replace(source, name=name), first, source)
        return self.carried[key].value

    def outside(self, times: Sequence[int], column: Sequence[Value]) -> Value:
        first = column[0]
        if all(v == first for v in column):
            return first
        in_tables = all(held(v) or v.name in self.tables for v in column)
        if len(times) < len(self.rows) and not in_tables:
            raise _Unfit  # these alone are read by the number of an iteration
        names = (str(times[0]), *(v.name for v in column))
        if names not in self.scanned:
            own = replace(first, name=f"{first.name}@{self.tag}{len(self.scanned)}")
            self.scanned[names] = Scanned(own, tuple(column), times[0])
        return self.scanned[names].value


def inner(v: Value) -> Value:
    """What the body has for a value of the first iteration."""
    return replace(v, name=f"{v.name}@")


def _merged(trees: list[Any], values: Iterator[Value], start: int) -> Any:
    """An argument in all iterations from `start` on -> that of the body."""
    first = trees[0]
    if isinstance(first, Value):
        return next(values)
    if isinstance(first, (tuple, list)):
        columns = zip(*trees, strict=True)
        return tuple([_merged(list(own), values, start) for own in columns])
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        same = all(x == first or (x != x and first != first) for x in trees)
        return first if same else Varying(tuple(trees), start)
    return first
