"""Lines of an emitted function, with what they let go of and under which condition."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby


def indented(lines: Iterable[str]) -> list[str]:
    """Indents lines by one block."""
    return ["    " + line for line in lines]


def only_if(condition: str, *lines: str) -> list[str]:
    """Wraps lines in an `if`, unless the condition is empty."""
    return [f"if {condition}:", *indented(lines)] if condition else [*lines]


def by_condition(lines: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Lines with their conditions, those under the same one together."""
    order = [*dict.fromkeys(when for when, _ in lines)]
    return sorted(lines, key=lambda each: order.index(each[0]))


def under_conditions(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Lines with their conditions ("": none), an `if` for neighbours under the same."""
    groups = groupby(lines, key=lambda each: each[0])
    parts = (only_if(when, *(line for _, line in own)) for when, own in groups)
    return [line for part in parts for line in part]


class Statements:
    """Statements of a body. What they let go of goes before the next one that could not
    run beside it: so one `del` does for many.

    peak: bytes that may be alive at once.
    """

    def __init__(self, peak: int) -> None:
        self.peak = peak
        self._lines: list[tuple[str, str]] = []  # with what they are under
        self._dead: dict[str, tuple[int, str]] = {}

    def add(self, lines: Iterable[str], level: int = 0, when: str = "") -> None:
        """level: bytes alive while they run, of what is not let go of yet; 0: they take
        none. when: a condition that they are under."""
        if level and level + sum(n for n, _ in self._dead.values()) > self.peak:
            self.end()
        self._lines += [(when, line) for line in lines]

    def free(self, names: Iterable[tuple[str, int]], when: str = "") -> None:
        """names: with the bytes that they may keep alive. when: a condition under which
        they are there."""
        self._dead |= {name: (freed, when) for name, freed in names}

    def again(self, names: Iterable[str]) -> None:
        """Names that stand for something else from now on."""
        for name in names:
            self._dead.pop(name, None)

    def end(self, of: Collection[str] | None = None) -> list[str]:
        """Frees all that is dead, if one of these names is."""
        if of is None or not self._dead.keys().isdisjoint(of):
            for when in dict.fromkeys(when for _, when in self._dead.values()):
                own = [name for name, (_, at) in self._dead.items() if at == when]
                self._lines += [(when, line) for line in delete(own)]
            self._dead.clear()
        return self.lines

    @property
    def lines(self) -> list[str]:
        return under_conditions(self._lines)


def delete(names: Iterable[str]) -> list[str]:
    """A `del` statement for those names that are locals."""
    deleted = [name for name in dict.fromkeys(names) if name.isidentifier()]
    return [f"del {', '.join(deleted)}"] if deleted else []
