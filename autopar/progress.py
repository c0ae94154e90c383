"""Shows work while it is done: `compile: insert_collectives done  3 s`.

Work names its phases by `tell`, wherever it is. A command shows them by `Progress`;
without one, as where autopar is a library, nothing is shown.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, ClassVar, TextIO

from autopar.terminal import is_terminal, width

CELLS = 20  # of a bar
TICK = 0.2  # seconds between drawings of a line on a terminal
PAUSE = 5.0  # seconds between lines elsewhere, and before the first


def tell(phase: str, done: int = 0, total: int = 0) -> None:
    """Shows the phase of the work; of `total` parts, if it has any, `done` are done."""
    if Progress.shown is not None:
        Progress.shown.change(phase, done, total)


class Progress:
    """Shows progress on stderr while it lasts: on a terminal as one line, which is
    cleared at the end; elsewhere as a line every PAUSE seconds, of what takes longer.

    task: the work. One inside of another names the same line as long as it lasts.
    """

    shown: ClassVar[Progress | None] = None

    def __init__(self, task: str, stream: TextIO | None = None) -> None:
        self.task, self.stream = task, stream or sys.stderr
        self.live = is_terminal(self.stream)
        self.phase, self.done, self.total = "", 0, 0
        self.began = self.drawn = time.monotonic()
        self.length = 0  # characters of the line that is there
        self.lock, self.ended = threading.RLock(), threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def change(self, phase: str, done: int, total: int) -> None:
        """Sets the phase shown, and how much of it is done."""
        self.phase, self.done, self.total = phase, done, total

    def text(self) -> str:
        """The present line."""
        words = [f"{self.task}:"]
        if self.phase:
            words.append(self.phase)
        if self.total:
            filled = "#" * (CELLS * self.done // self.total)
            words.append(f"[{filled:<{CELLS}}] {self.done:,} of {self.total:,}")
        return " ".join([*words, f" {time.monotonic() - self.began:.0f} s"])

    def draw(self) -> None:
        """Write the line: on a terminal over the one before."""
        with self.lock:
            self.drawn = time.monotonic()
            text = self.text()
            if self.live:
                text = text[: width() - 1]
                self.stream.write(f"\r{text:<{self.length}}")
                self.length = len(text)
            else:
                self.stream.write(f"{text}\n")
            self.stream.flush()

    def clear(self) -> None:
        """Erases the line."""
        with self.lock:
            if self.length:
                self.stream.write(f"\r{'':<{self.length}}\r")
                self.stream.flush()
            self.length = 0

    def _watch(self) -> None:
        while not self.ended.wait(TICK):
            if self.live or time.monotonic() - self.drawn >= PAUSE:
                self.draw()

    def __enter__(self) -> Progress:
        if Progress.shown is not None:
            self.outer = Progress.shown.task
            Progress.shown.task = self.task
            return self
        Progress.shown = self
        if self.live:
            self.stderr, sys.stderr = sys.stderr, _Above(self)
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if Progress.shown is not self:
            if Progress.shown is not None:
                Progress.shown.task = self.outer
            return
        Progress.shown = None
        self.ended.set()
        self.thread.join()
        self.clear()
        if self.live:
            sys.stderr = self.stderr


class _Above:
    """Stderr while a line is live: what else is written there comes above the line."""

    def __init__(self, line: Progress) -> None:
        self._line = line

    def write(self, text: str) -> int:
        with self._line.lock:
            self._line.clear()
            return self._line.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line.stream, name)
