"""Tables and numbers for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

WIDTH = 100  # characters in a line of a report


@dataclass(frozen=True)
class Table:
    """title, notes: above and below. rows[i][j] belongs to columns[j]."""

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
        body = tabulate(
            cells,
            headers=self.columns,
            tablefmt="simple",
            disable_numparse=True,
            colalign=["right" if n else "left" for n in numeric] if cells else None,
        )
        lines = "\n".join(line.rstrip() for line in body.splitlines())
        return "\n".join([self.title, "", lines, *(wrap(note) for note in self.notes)])


def wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


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
