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

from ..graph import LAYER, Node, Value
from ..stage.loop import Carried, Item, Loop
from ..stage.loops import without_ends


@dataclass(eq=False)
class Rows:
    """What one reader takes of a loop. values: of the loop's body, or what it carries.
    source, reader: numbers of the parts that write and read them. iterations: of the
    source that are read. shift: (iteration of the source that the reader's first one
    takes, step); None: the reader is no loop."""

    loop: Loop
    source: int
    reader: int
    into: Loop | None
    shift: tuple[int, int] | None
    values: dict[str, Value] = field(default_factory=dict)
    iterations: set[int] = field(default_factory=set)

    def row(self, carried: bool) -> list[Value]:
        """The values that are there when an iteration begins, in order; or the others,
        as they are made."""
        there = (c.value for c in self.loop.carried)
        made = (v for node in self.loop.body for v in node.results)
        return [v for v in (there if carried else made) if v.name in self.values]

    @property
    def all(self) -> list[Value]:
        return [*self.row(carried=True), *self.row(carried=False)]


@dataclass
class Part:
    """One function of a module: what it runs, and what it returns."""

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
    """The parts, with loops only of iterations that read what iterations of earlier
    loops made: the first and last ones often read what was made outside of these."""
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
    """From which iteration to which all that is given is made by one loop each; all, if
    there are not two of these."""
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
        those = [t for t, own in enumerate(makers) if usual[0][0] in own]
        begin, end = max(begin, those[0]), min(end, those[-1] + 1)
    return (begin, end) if end - begin > 1 else (0, loop.count)


def _entering(loop: Loop, one: Carried) -> list[Value | None]:
    """What each iteration is handed by the one before; None for nothing."""
    (at,) = (
        (o, j)
        for o, node in enumerate(loop.body)
        for j, v in enumerate(node.outs)
        if v == one.next
    )
    entering = [one.first]
    for row in loop.rows[:-1]:
        node = row[at[0]]
        entering.append(node.outs[at[1]] if node is not None else None)
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
        # (part, id of a loop, name of what is given) -> where it is found.
        self.rows_of: dict[tuple[int, int, str], tuple[Rows, Value]] = {}
        # (part, name of a value) -> where a straight reader finds it.
        self.singles: dict[tuple[int, str], tuple[Rows, Value, int]] = {}
        for number, part in enumerate(parts):
            for item in part.items:
                if isinstance(item, Node):
                    for v in item.operands:
                        self._read(number, v)
                else:
                    self._read_loop(number, item)
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
            where = self._rows_of(number, loop, scanned.values)
            if where is None:
                for v in scanned.values:
                    self._read(number, v)
            else:
                self.rows_of[number, id(loop), scanned.value.name] = where

    def _read(self, number: int, v: Value) -> None:
        """Read by name: of what a loop makes, the last iteration's still has one."""
        if v.name in self.tables:
            return
        for source in range(number, -1, -1):
            part = self.parts[source]
            if v.name in part.instances:
                loop, inner, t = part.instances[v.name]
                if t < loop.count - 1:
                    rows = self._rows(loop, source, number, None, None)
                    rows.values[inner.name] = inner
                    rows.iterations.add(t)
                    self.singles[number, v.name] = rows, inner, t
                    return
            if v.name in part.made:
                break
        for between in range(source, number + 1):
            self.parts[between].read[v.name] = v

    def _rows_of(
        self, number: int, reader: Loop, values: Sequence[Value]
    ) -> tuple[Rows, Value] | None:
        """Where an earlier loop made what a loop is given."""
        for source in range(number, -1, -1):
            part = self.parts[source]
            for loop, inner, first in self.identities(part, values[0]):
                seconds = self.identities(part, values[1])
                for other, same, second in seconds:
                    if other is not loop or same != inner or loop is reader:
                        continue
                    shift = first, second - first
                    ways = [
                        (loop, inner, first + t * (second - first))
                        for t in range(len(values))
                    ]
                    if shift[1] and all(
                        any(_same(way, own) for own in self.identities(part, v))
                        for v, way in zip(values, ways, strict=True)
                    ):
                        rows = self._rows(loop, source, number, reader, shift)
                        rows.values[inner.name] = inner
                        rows.iterations.update(t for _, _, t in ways)
                        return rows, inner
            if values[0].name in part.made:
                return None
        return None

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
    ) -> Rows:
        for rows in self.rows:
            same = rows.loop is loop and rows.into is reader and rows.shift == shift
            if same and rows.reader == number:
                return rows
        self.rows.append(Rows(loop, source, number, reader, shift))
        return self.rows[-1]


def _same(a: tuple[Loop, Value, int], b: tuple[Loop, Value, int]) -> bool:
    return a[0] is b[0] and a[1:] == b[1:]
