"""Tables and numbers for people."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from autopar.terminal import styled, width, wrap

GAP = 2  # characters between columns
PADDING = 2  # of what stands above a column, see `tabulate.MIN_PADDING`
NARROW = 6  # characters that a column of text keeps, however narrow the terminal


@dataclass(frozen=True)
class Table:
    """title, notes: above and below. rows[i][j] belongs to columns[j].

    As text it is as wide as the terminal at most: what is longest is wrapped.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        cells = [[_shown(cell) for cell in row] for row in self.rows]
        numeric = [
            bool(self.rows)
            and all(isinstance(row[j], int | float) for row in self.rows)
            for j in range(len(self.columns))
        ]
        widths = _widths(self.columns, cells, numeric)
        cells = [list(map(_folded, row, widths)) for row in cells]
        body = tabulate(
            cells,
            headers=list(map(_folded, self.columns, (w - PADDING for w in widths))),
            tablefmt="simple",
            disable_numparse=True,
            colalign=["right" if n else "left" for n in numeric] if cells else None,
        )
        lines = "\n".join(line.rstrip() for line in body.splitlines())
        title = "\n".join(
            styled(line, "bold", sys.stdout) for line in wrap(self.title).splitlines()
        )
        return "\n".join([title, "", lines, *(wrap(note) for note in self.notes)])


def _widths(
    head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> list[int]:
    """Returns what each column needs, or less if all are wider than the terminal.

    The widest gives way first, down to its longest word, and then within words; numbers
    stay whole.
    """
    columns = list(zip(*rows, strict=True)) or [()] * len(head)
    widths = [
        max(PADDING + len(h), *map(_longest, column), 0)
        for h, column in zip(head, columns, strict=True)
    ]
    words = [
        max(PADDING + _longest_word(h), *map(_longest_word, column), 0)
        for h, column in zip(head, columns, strict=True)
    ]
    most = width() - GAP * (len(columns) - 1)
    for kept in (words, [NARROW] * len(columns)):
        least = [
            word if number else min(word, keep)
            for word, keep, number in zip(words, kept, numeric, strict=True)
        ]
        while sum(widths) > most:
            open_to = [j for j, wide in enumerate(widths) if wide > least[j]]
            if not open_to:
                break
            widths[max(open_to, key=lambda j: widths[j])] -= 1
    return widths


def _longest(cell: str) -> int:
    return max(map(len, cell.splitlines()), default=0)


def _longest_word(cell: str) -> int:
    return max(map(len, cell.split()), default=0)


def _folded(cell: str, wide: int) -> str:
    """Wraps lines of a cell that are too long."""
    return "\n".join(
        line
        if len(line) <= wide
        else textwrap.fill(line, max(1, wide), break_on_hyphens=False)
        for line in cell.split("\n")
    )


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> `0-2,5`; ascending."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _shown(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
