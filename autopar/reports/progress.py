"""A progress bar on a terminal's stderr; elsewhere nothing."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

CELLS = 30
PAUSE = 0.1  # seconds between drawings


class Bar:
    """`planning [######      ] 512 of 1,344`; use it as a context, which clears it."""

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self.what, self.stream = what, stream or sys.stderr
        self.live = self.stream.isatty()
        self.drawn = float("-inf")
        self.width = 0

    def __call__(self, done: int, total: int) -> None:
        """So many of so many are done."""
        now = time.monotonic()
        if not self.live or now - self.drawn < PAUSE:
            return
        self.drawn = now
        filled = "#" * (CELLS * done // max(1, total))
        text = f"{self.what} [{filled:<{CELLS}}] {done:,} of {total:,}"
        self.stream.write(f"\r{text:<{self.width}}")
        self.stream.flush()
        self.width = len(text)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self.width:
            self.stream.write(f"\r{'':<{self.width}}\r")
            self.stream.flush()
