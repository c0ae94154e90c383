"""A loop of an emitted function: nodes that repeat, and what differs between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from ..graph import Node, Value


@dataclass(frozen=True)
class Varying:
    """A constant that differs by iteration. times: the iterations."""

    values: tuple[int | float, ...]
    times: tuple[int, ...]


@dataclass(frozen=True)
class Carried:
    """A value that one iteration hands to the next. value: its name in the body. first:
    the value that the first iteration reads, if it does. next: the body's value that
    the next iteration reads."""

    value: Value
    first: Value | None
    next: Value


@dataclass(frozen=True)
class Scanned:
    """A value from outside that each of some iterations has its own of. value: its name
    in the body. times: these iterations."""

    value: Value
    values: tuple[Value, ...]
    times: tuple[int, ...]


Row = tuple[Node | None, ...]


@dataclass(frozen=True)
class Loop:
    """Nodes that repeat.

    rows: the nodes by iteration, None where an iteration lacks one. body: one node for
    each column, which reads `carried` and `scanned` values by their names in the body,
    and constants that vary as `Varying`; a value that different nodes make in different
    iterations has one name. layer: (first, step) of the number of an iteration's layer.
    lasting: names of values that later iterations than the next read, until they are
    made again.
    """

    rows: tuple[Row, ...]
    body: tuple[Node, ...]
    carried: tuple[Carried, ...]
    scanned: tuple[Scanned, ...]
    layer: tuple[int, int]
    lasting: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def index(self) -> tuple[int, int]:
        """(first, step) of the number that tells iterations apart."""
        return self.layer if self.layer[1] else (0, 1)

    @property
    def outside(self) -> dict[str, Value]:
        """The values, by name, that the body reads from outside of the loop."""
        own = {v.name for node in self.body for v in node.results}
        own |= {c.value.name for c in self.carried}
        own |= {s.value.name for s in self.scanned}
        reads = (v for node in self.body for v in node.operands)
        return {v.name: v for v in reads if v.name not in own}

    def nodes(self, o: int) -> list[Node]:
        """The nodes that a node of the body stands for, by iteration."""
        return [node for row in self.rows if (node := row[o]) is not None]

    def times(self, o: int) -> tuple[int, ...]:
        """The iterations that run a node of the body."""
        return tuple(t for t, row in enumerate(self.rows) if row[o] is not None)

    @cached_property
    def makers(self) -> dict[str, list[int]]:
        """Value of the body -> the nodes that make it, in different iterations."""
        makers: dict[str, list[int]] = {}
        for o, node in enumerate(self.body):
            for v in node.results:
                makers.setdefault(v.name, []).append(o)
        return makers

    def times_of(self, made: str) -> tuple[int, ...]:
        """The iterations that make a value of the body."""
        return tuple(sorted(t for o in self.makers[made] for t in self.times(o)))

    def instances(self) -> Iterator[tuple[str, Value, int]]:
        """(name of a value, its value in the body, iteration)."""
        for t, row in enumerate(self.rows):
            for own, node in zip(self.body, row, strict=True):
                for inner, v in zip(own.outs, node.outs if node else (), strict=False):
                    if v is not None and inner is not None:
                        yield v.name, inner, t

    def unrolled(self) -> list[Node]:
        return [node for row in self.rows for node in row if node is not None]


Item = Node | Loop


# --- series of numbers --------------------------------------------------------------


def line(
    values: Sequence[int | float], times: Sequence[int] = ()
) -> tuple[Fraction, Fraction] | None:
    """(first, step) of whole numbers on one line: of iteration 0, and from one to the
    next, where neither has to be whole. times: the iterations that have them; (): all.
    """
    if not all(isinstance(v, int) for v in values):
        return None
    own = times or range(len(values))
    step = Fraction(int(values[1] - values[0]), own[1] - own[0])
    first = int(values[0]) - step * own[0]
    even = all(v == first + step * t for t, v in zip(own, values, strict=True))
    return (first, step) if even else None


def series(values: Sequence[int], times: Sequence[int] = ()) -> tuple[int, int] | None:
    """The same, where both are whole."""
    numbers = line(values, times)
    if numbers is None or not all(x.denominator == 1 for x in numbers):
        return None
    first, step = numbers
    return int(first), int(step)


NUMBER = re.compile(r"(\d+)")


def numbered(
    names: Sequence[str], times: Sequence[int] = ()
) -> list[str | tuple[Fraction, Fraction]] | None:
    """Names that differ in numbers, which are on a line: the pieces, and the lines.
    times: see `line`."""
    split = [NUMBER.split(name) for name in names]
    if len({len(parts) for parts in split}) > 1:
        return None
    row: list[str | tuple[Fraction, Fraction]] = []
    for column in zip(*split, strict=True):
        if len(set(column)) == 1:
            row.append(column[0])
            continue
        if not all(part.isdigit() and str(int(part)) == part for part in column):
            return None
        if (one := line([int(part) for part in column], times)) is None:
            return None
        row.append(one)
    return row
