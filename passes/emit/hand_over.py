"""hand_over: what the functions of a module keep for those that run after them.

Of what a loop makes, each reader gets the values that it reads in rows, one for each
iteration: so a row is gone as soon as its reader has taken it, however many others
there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ..emit.loop import Carried, Item, Loop, Scanned, series
from ..emit.loops import without_ends
from ..graph import LAYER, Node, Value


@dataclass(eq=False)
class Rows:
    """The values of a loop that one reader takes. values: of its body, or carried.
    source, reader: numbers of the parts that write and read. times: iterations of the
    source that have them. iterations: those that are read. shift: (the source's
    iteration that the reader's first takes, step); None: the reader is no loop."""

    loop: Loop
    source: int
    reader: int
    into: Loop | None
    shift: tuple[int, int] | None
    times: frozenset[int]
    values: dict[str, Value] = field(default_factory=dict)
    iterations: set[int] = field(default_factory=set)

    def row(self, carried: bool) -> list[Value]:
        """The values that are there when an iteration begins, in order; or the others,
        as they are made."""
        there = (c.value for c in self.loop.carried)
        made = (v for node in self.loop.body for v in node.results)
        every = dict.fromkeys(there if carried else made)
        return [v for v in every if v.name in self.values]

    @property
    def all(self) -> list[Value]:
        return [*self.row(carried=True), *self.row(carried=False)]


@dataclass(frozen=True)
class Source:
    """Rows that a loop's operand is read from. value: that the making loop stores in
    them. times: the reading iterations."""

    rows: Rows
    value: Value
    times: tuple[int, ...]


@dataclass
class Part:
    """One function of a module: its items and results."""

    items: Sequence[Item]
    results: Sequence[Value] = ()
    made: set[str] = field(default_factory=set)
    # Instances of values that loops make: (loop, value in its body, iteration).
    instances: dict[str, tuple[Loop, Value, int]] = field(default_factory=dict)
    # The same for what loops carry: a value may be that of several.
    carried: dict[str, list[tuple[Loop, Value, int]]] = field(default_factory=dict)
    # Values of this part or of an earlier one that are read by their own names.
    read: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in self.items:
            if isinstance(item, Node):
                self.made.update(v.name for v in item.results)
                continue
            for name, inner, t in item.instances():
                self.made.add(name)
                self.instances[name] = item, inner, t
            for one in item.carried:
                for t, v in enumerate(_entering(item, one)):
                    if v is not None:
                        place = item, one.value, t
                        self.carried.setdefault(v.name, []).append(place)


def split_readers(parts: Sequence[Sequence[Item]]) -> list[Sequence[Item]]:
    """The parts, with loops cut to the iterations that read results of earlier loops:
    the first and last ones often read values from outside of these."""
    groups: list[Sequence[Item]] = []
    for items in parts:
        own: list[Item] = []
        before = [*map(Part, groups)]
        for item in items:
            if isinstance(item, Loop):
                ends = _reading_rows(item, [*before, Part(own)])
                own += without_ends(item, *ends)
            else:
                own.append(item)
        groups.append(own)
    return groups


def _reading_rows(loop: Loop, before: Sequence[Part]) -> tuple[int, int]:
    """The iterations [begin, end) in which each operand comes from one earlier loop;
    all, if there are fewer than two."""
    begin, end = 0, loop.count
    for scanned in loop.scanned:
        makers = [
            {
                (id(maker), inner.name)
                for part in before
                for maker, inner, _ in HandOver.identities(part, v)
            }
            for v in scanned.values
        ]
        usual = Counter(one for own in makers for one in own).most_common(1)
        if not usual:
            continue
        times = scanned.times
        those = [t for t, own in zip(times, makers, strict=True) if usual[0][0] in own]
        begin = max(begin, those[0]) if those[0] > times[0] else begin
        end = min(end, those[-1] + 1) if those[-1] < times[-1] else end
    return (begin, end) if end - begin > 1 else (0, loop.count)


def _entering(loop: Loop, one: Carried) -> list[Value | None]:
    """The value that each iteration gets from the one before; None for none."""
    entering: list[Value | None] = [one.first, *[None] * (loop.count - 1)]
    for o in loop.makers[one.next.name]:
        j = loop.body[o].outs.index(one.next)
        for t, row in enumerate(loop.rows[:-1]):
            if (node := row[o]) is not None:
                entering[t + 1] = node.outs[j]
    return entering


class HandOver:
    """Finds out what each part of a module has of which other.

    tables: how values that are there anyway are read, by name. same: value -> the one
    that it is called after.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        tables: Mapping[str, str],
        same: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.parts, self.tables, self.same = parts, tables, same
        self.rows: list[Rows] = []
        self.over: set[int] = set()  # ids of loops that run before the one at hand
        # (part, id of a loop, name of what is given) -> where some iterations find it.
        self.rows_of: dict[tuple[int, int, str], list[Source]] = {}
        # (part, name of a value) -> where a straight reader finds it.
        self.singles: dict[tuple[int, str], tuple[Rows, Value, int]] = {}
        for number, part in enumerate(parts):
            for item in part.items:
                if isinstance(item, Node):
                    for v in item.operands:
                        self._read(number, v)
                else:
                    self._read_loop(number, item)
                    self.over.add(id(item))
            for v in part.results:
                self._read(number, v)

    def nickname(self, name: str) -> str:
        """The name of a value, or the value of a cotangent, in the body of its loop."""
        before = "d_" if name.startswith("d_") else ""
        if layer := LAYER.search(name):
            return before + name[layer.end() + 1 :]
        own = name.removeprefix(before)
        for part in self.parts:
            if (instance := part.instances.get(own)) is not None:
                return before + instance[1].name
        return before + self.same.get(own, own)

    def rows_between(self, source: int, reader: int) -> list[Rows]:
        """Rows that a part hands on for later ones, this reader or those after it."""
        return [r for r in self.rows if r.source <= source and r.reader >= reader]

    def single(self, number: int, v: Value) -> tuple[Rows, Value, int] | None:
        return self.singles.get((number, v.name))

    def _read_loop(self, number: int, loop: Loop) -> None:
        for v in loop.outside.values():
            self._read(number, v)
        for one in loop.carried:
            if one.first is not None:
                self._read(number, one.first)
        for scanned in loop.scanned:
            texts = [self.tables.get(v.name) for v in scanned.values]
            if all(text is not None for text in texts):
                continue
            key = number, id(loop), scanned.value.name
            self.rows_of[key] = self._rows_of(number, loop, scanned)
            for v in self.parts_of(number, loop, scanned)[1].values():
                self._read(number, v)

    def _read(self, number: int, v: Value) -> None:
        """Notes what is read by name; a loop's results, but for the last, are in
        rows."""
        if v.name in self.tables:
            return
        for source in range(number, -1, -1):
            part = self.parts[source]
            if v.name in part.instances:
                loop, inner, t = part.instances[v.name]
                if t < loop.count - 1:
                    times = frozenset(loop.times_of(inner.name))
                    rows = self._rows(loop, source, number, None, None, times)
                    rows.values[inner.name] = inner
                    rows.iterations.add(t)
                    self.singles[number, v.name] = rows, inner, t
                    return
            if v.name in part.made:
                break
        for between in range(source, number + 1):
            self.parts[between].read[v.name] = v

    def parts_of(
        self, number: int, loop: Loop, scanned: Scanned
    ) -> tuple[list[Source], dict[int, Value]]:
        """The sources of a loop's operand: rows of earlier loops, and by iteration the
        values that are in none."""
        sources = self.rows_of.get((number, id(loop), scanned.value.name), [])
        kept = {t for source in sources for t in source.times}
        own = zip(scanned.times, scanned.values, strict=True)
        return sources, {t: v for t, v in own if t not in kept}

    def _rows_of(self, number: int, reader: Loop, scanned: Scanned) -> list[Source]:
        """The rows of earlier loops that a loop's operand is read from."""
        places: dict[tuple[int, int, str], dict[int, tuple[Loop, Value, int]]] = {}
        for t, v in zip(scanned.times, scanned.values, strict=True):
            for source in range(number, -1, -1):
                for place in self.identities(self.parts[source], v):
                    if id(place[0]) in self.over:
                        key = source, id(place[0]), place[1].name
                        places.setdefault(key, {})[t] = place
                if v.name in self.parts[source].made:
                    break
        left, sources = {*scanned.times}, list[Source]()
        fitting = sorted(places.items(), key=lambda one: _suits(reader, one[1]))
        for (source, _, _), each in fitting:
            times = [t for t in each if t in left]
            loop, inner, _ = next(iter(each.values()))
            ways = [each[t][2] for t in times]
            shift = _shift(loop, reader, times, ways)
            if shift is not None:
                rows = self._rows(loop, source, number, reader, shift, frozenset(ways))
                rows.values[inner.name] = inner
                rows.iterations.update(ways)
                sources.append(Source(rows, inner, tuple(times)))
                left -= {*times}
        return sources

    @staticmethod
    def identities(part: Part, v: Value) -> Iterator[tuple[Loop, Value, int]]:
        if v.name in part.instances:
            yield part.instances[v.name]
        yield from part.carried.get(v.name, ())

    def _rows(
        self,
        loop: Loop,
        source: int,
        number: int,
        reader: Loop | None,
        shift: tuple[int, int] | None,
        times: frozenset[int],
    ) -> Rows:
        for rows in self.rows:
            same = rows.loop is loop and rows.into is reader and rows.shift == shift
            if same and rows.reader == number and rows.times == times:
                return rows
        self.rows.append(Rows(loop, source, number, reader, shift, times))
        return self.rows[-1]


def _suits(
    reader: Loop, each: Mapping[int, tuple[Loop, Value, int]]
) -> tuple[int, int]:
    """Lowest for what most iterations find, and of their own layer."""
    first, step = reader.index
    apart = 0
    for t, (loop, _, at) in each.items():
        begin, by = loop.index
        apart += begin + by * at != first + step * t
    return -len(each), apart


def _shift(
    loop: Loop, reader: Loop, times: Sequence[int], ways: Sequence[int]
) -> tuple[int, int] | None:
    """(first, step) of the iterations of a loop that those of its reader take; None if
    they are at no even distances."""
    if not times:
        return None
    if len(times) > 1:
        shift = series(ways, times)
    else:  # of the same layer
        step, rest = divmod(reader.index[1], loop.index[1])
        shift = None if rest else (ways[0] - step * times[0], step)
    return shift if shift and shift[1] else None
