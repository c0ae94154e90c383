"""One loop of rows of nodes that are alike, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..emit.loop import Carried, Loop, Row, Scanned, Varying, series
from ..graph import LAYER, Node, Value

Place = tuple[int, int, int]  # of a value: its row, node there, and result of that
Result = tuple[int, int]  # node of a row, and result of that


def loop_of(rows: Sequence[tuple[Node, ...]]) -> Loop | None:
    """The loop that the first rows make, as many as fit together; None if not two."""
    if len(rows) < 2:
        return None
    count = fitting(rows)
    return loop_of_all(rows[:count]) if count > 1 else None


def loop_of_all(
    rows: Sequence[Row],
    tables: Collection[str] | None = (),
    layers: Sequence[int] | None = None,
) -> Loop | None:
    """The loop of all rows, which may be without some nodes; None if they do not fit
    together. tables: names of what is there before it, for each iteration by its
    number: some iterations alone read no other values of their own; None: they may.
    layers: the number of each row's layer, if that is known."""
    some = [o for o in range(len(rows[0])) if any(row[o] for row in rows)]
    rows = [tuple(row[o] for o in some) for row in rows]
    try:
        return _Body(tuple(rows), made_by(rows), tables).loop(layers)
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
        self,
        rows: tuple[Row, ...],
        made: dict[str, Place],
        tables: Collection[str] | None,
    ) -> None:
        self.rows, self.made, self.tables = rows, made, tables
        # Names of values in the body are those of no other loop.
        nodes = (node for row in rows for node in row if node is not None)
        first = next(v for n in nodes for v in (*n.results, *n.operands))
        self.tag = f"{first.name}@"
        self.carried: dict[tuple[str, str], Carried] = {}
        self.scanned: dict[tuple[object, ...], Scanned] = {}
        # Result of a node -> that of another, which is the same value of the body.
        self.joined: dict[Result, Result] = {}
        # Result -> what first iterations read in its place.
        self.firsts: dict[Result, dict[str, Value]] = {}
        self.lasting: set[Result] = set()  # what stays for more than the next iteration

    def loop(self, layers: Sequence[int] | None) -> Loop:
        numbers = self.numbers() if layers is None else layers
        line = series(numbers)
        if line is None:
            raise _Unfit
        own = [self.instances(o) for o in range(len(self.rows[0]))]
        for one in own:
            self.join(one)
        self.check_apart()
        self.lasting = {self.root(result) for result in self.lasting}
        body = tuple(self.node(o, one) for o, one in enumerate(own))
        carried, scanned = tuple(self.carried.values()), tuple(self.scanned.values())
        lasting = frozenset(self.source(result).name for result in self.lasting)
        return Loop(self.rows, body, carried, scanned, line, lasting)

    def instances(self, o: int) -> list[tuple[int, Node]]:
        """Iterations with their node in a place."""
        return [(t, node) for t, row in enumerate(self.rows) if (node := row[o])]

    def numbers(self) -> list[int]:
        """The number of each row's layer: of nodes that all rows have."""
        whole = [o for o in range(len(self.rows[0])) if all(r[o] for r in self.rows)]
        return [number(row[o] for o in whole) for row in self.rows]

    # --- what is one value of the body ----------------------------------------------

    def join(self, own: Sequence[tuple[int, Node]]) -> None:
        """Unites the results that a node reads of this iteration, and those of the one
        before; all of them, if one reads an older one."""
        for column in zip(*(node.operands for _, node in own), strict=True):
            pairs = zip(own, column, strict=True)
            places = [(t, self.made.get(v.name)) for (t, _), v in pairs]
            ways = [way for t, at in places if (way := _way(at, t)) is not None]
            if any(far > 1 for far, *_ in ways):
                self.unite([(o, j) for _, o, j in ways])
                self.lasting.add(ways[0][1:])
            for own_far in (0, 1):
                self.unite([(o, j) for far, o, j in ways if far == own_far])
            before = next(((o, j) for far, o, j in ways if far), None)
            if before is not None and places[0] == (0, None):
                firsts = self.firsts.setdefault(before, {})
                firsts[column[0].name] = column[0]

    def unite(self, results: Sequence[Result]) -> None:
        for one in results[1:]:
            a, b = sorted((self.root(results[0]), self.root(one)))
            if a != b:
                self.joined[b] = a

    def root(self, result: Result) -> Result:
        while result in self.joined:
            result = self.joined[result]
        return result

    def check_apart(self) -> None:
        """Raises _Unfit where an iteration makes a united value more than once."""
        for one in {self.root(result) for result in self.joined}:
            times = self.times_of(one)
            if len(times) != len({*times}):
                raise _Unfit

    def times_of(self, root: Result) -> list[int]:
        """The iterations that make a united value, one for each time it is made."""
        alike = [root, *(one for one in self.joined if self.root(one) == root)]
        return [t for o, _ in alike for t, row in enumerate(self.rows) if row[o]]

    # --- nodes ----------------------------------------------------------------------

    def node(self, o: int, own: Sequence[tuple[int, Node]]) -> Node:
        times, nodes = tuple(t for t, _ in own), [node for _, node in own]
        columns = zip(*(n.operands for n in nodes), strict=True)
        values = iter([self.value(times, column) for column in columns])
        args = _merged([n.args for n in nodes], values, times)
        keys = nodes[0].kwargs.keys()
        kwargs = {k: _merged([n.kwargs[k] for n in nodes], values, times) for k in keys}
        outs = tuple(v and self.source((o, j)) for j, v in enumerate(nodes[0].outs))
        # What runs at the edge of a layer belongs to another module in the first one.
        where = nodes[times.index(1) if 1 in times else 0].location
        return Node(nodes[0].op, args, kwargs, outs, where)

    def value(self, times: tuple[int, ...], column: Sequence[Value]) -> Value:
        """The body's value for an operand. times: the iterations that read it. Raises
        _Unfit."""
        ways = [self.way(v, t) for t, v in zip(times, column, strict=True)]
        some = {*ways}
        if times[0] == 0 and ways[0] is None:
            some = {*ways[1:]} or some
        if any(way is not None and way[1] in self.lasting for way in ways):
            return self.lasting_value(times, ways)
        if len(some) > 1:
            raise _Unfit
        (way,) = some
        if way is None:
            return self.outside(times, column)
        far, result = way
        if far > 1 or (far == 0 and ways[0] is None):
            raise _Unfit
        if not far:
            return self.source(result)
        return self.carry(None if ways[0] else column[0], result)

    def lasting_value(
        self, times: Sequence[int], ways: Sequence[tuple[int, Result] | None]
    ) -> Value:
        """The value that lasts until it is made again. Raises _Unfit if none fits."""
        results = {way[1] for way in ways if way is not None}
        if None in ways or len(results) > 1:
            raise _Unfit
        (result,) = results
        made = self.times_of(result)
        for t, way in zip(times, ways, strict=True):
            assert way is not None, "all iterations read what is made in the loop"
            if any(t - way[0] < later <= t for later in made):
                raise _Unfit
        return self.source(result)

    def way(self, v: Value, t: int) -> tuple[int, Result] | None:
        """(iterations ago, result) of a value that the loop makes; None of others."""
        at = self.made.get(v.name)
        return None if at is None else (t - at[0], self.root(at[1:]))

    def source(self, result: Result) -> Value:
        """The value of the body that a result is."""
        o, j = self.root(result)
        made = next(node for row in self.rows if (node := row[o])).outs[j]
        if made is None:
            raise _Unfit
        return inner(made)

    def carry(self, first: Value | None, result: Result) -> Value:
        source = self.source(result)
        if first is None:  # as others have it, if these agree
            known = {
                name: v
                for one, firsts in self.firsts.items()
                if self.root(one) == result
                for name, v in firsts.items()
            }
            first = next(iter(known.values())) if len(known) == 1 else None
        key = (first.name if first else "", source.name)
        if key not in self.carried:
            d = "d_" if source.name.startswith("d_") else ""
            called = f"{d}x" if first else source.name.partition("@")[0]
            inside = replace(source, name=self.unused(called))
            self.carried[key] = Carried(inside, first, source)
        return self.carried[key].value

    def outside(self, times: tuple[int, ...], column: Sequence[Value]) -> Value:
        first = column[0]
        alone = self.tables is None and len(column) == 1 < len(self.rows)
        if all(v == first for v in column) and not alone:
            return first
        some = self.tables is not None and len(times) < len(self.rows)
        if some and not all(held(v) or v.name in (self.tables or ()) for v in column):
            raise _Unfit  # these alone are read by the number of an iteration
        names = (times, *(v.name for v in column))
        if names not in self.scanned:
            own = replace(first, name=self.unused(first.name))
            self.scanned[names] = Scanned(own, tuple(column), times)
        return self.scanned[names].value

    def unused(self, called: str) -> str:
        """A name in the body of what is carried or given."""
        return f"{called}@{self.tag}{len(self.carried) + len(self.scanned)}"


def inner(v: Value) -> Value:
    """The body's value for a value of the first iteration."""
    return replace(v, name=f"{v.name}@")


def _merged(trees: list[Any], values: Iterator[Value], times: tuple[int, ...]) -> Any:
    """An argument in some iterations -> that of the body."""
    first = trees[0]
    if isinstance(first, Value):
        return next(values)
    if isinstance(first, (tuple, list)):
        columns = zip(*trees, strict=True)
        return tuple([_merged(list(own), values, times) for own in columns])
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        same = all(x == first or (x != x and first != first) for x in trees)
        return first if same else Varying(tuple(trees), times)
    return first
