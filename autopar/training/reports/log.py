"""The log of a run: a file of JSON lines, to which runs that go on append."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopar.training.reports.metrics import Clock, Row, as_json


@dataclass
class Log:
    """Lines of every so many steps, and of evaluations; every: steps.

    After a crash the steps since the checkpoint are there twice: the later line counts.
    """

    path: Path
    every: int
    last: int
    clock: Clock

    def open(self) -> None:
        """End a line that a crash cut off. Raises OSError if it cannot be written."""
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")

    def wants(self, done: int) -> bool:
        return done % self.every == 0 or done == self.last

    def write(self, row: Row) -> None:
        with self.path.open("a") as file:
            file.write(as_json(row) + "\n")

    def close(self) -> None:
        """Does nothing: each line was written when it came."""
