"""Prints the lines of a run."""

from __future__ import annotations

import sys
import time

from autopar.terminal import is_terminal, width
from autopar.training.options import RunOptions
from autopar.training.reports.metrics import METRIC, Clock, Row, as_json
from autopar.units import size


class Progress:
    """A line every PAUSE seconds, on a terminal with a live one below; or JSON lines.

    Only for a line a loss is read, which waits for a GPU. done: steps made before.
    """

    LIVE, PAUSE = 0.1, 2.0

    def __init__(self, options: RunOptions, done: int) -> None:
        self.options, self.clock = options, Clock(done)
        self.live = is_terminal(sys.stdout) and not options.json
        self.pause = 0.0 if options.json else self.LIVE if self.live else self.PAUSE
        self.printed = self.kept = float("-inf")
        self.length = 0  # characters of the live line

    def wants(self, done: int) -> bool:
        paused = time.monotonic() - self.printed >= self.pause
        return paused or done == self.options.steps

    def write(self, row: Row) -> None:
        self.printed = time.monotonic()
        if self.options.json:
            print(as_json(row), flush=True)
            return
        last = row["step"] == self.options.steps
        if "eval_loss" in row:
            text = f"step {row['step']}  held out: loss {row['eval_loss']:.5f}"
            text += f"  perplexity {row['eval_perplexity']:,.2f}"
            if "ema_eval_loss" in row:
                text += f"  of averaged weights: loss {row['ema_eval_loss']:.5f}"
                text += f"  perplexity {row['ema_eval_perplexity']:,.2f}"
            print("\n" * (self.length > 0) + text, flush=True)
            self.length = 0
        elif self.live and not last and self.printed - self.kept < self.PAUSE:
            text = self._text(row)[: width() - 1]
            print(f"\r{text:<{self.length}}", end="", flush=True)
            self.length = len(text)
        else:
            before = "\r" * (self.length > 0)
            print(f"{before}{self._text(row):<{self.length}}", flush=True)
            self.kept, self.length = self.printed, 0

    def close(self) -> None:
        """Does nothing: each line was printed when it came."""

    def _text(self, row: Row) -> str:
        text = f"step {row['step']}/{self.options.steps}  loss {row['loss']:.5f}"
        if "reference_loss" in row:
            text += f"  single device {row['reference_loss']:.5f}"
        for name, value in row.items():
            if name.startswith(METRIC):
                text += f"  {name.removeprefix(METRIC)} {value:.5f}"
        text += f"  norm {row['grad_norm']:.3g}  lr {row['lr']:.3g}"
        text += f"  {row['tokens_per_second']:,.0f} tokens/s"
        if "mfu" in row:
            text += f"  MFU {row['mfu']:.1%}"
        return f"{text}  {size(row['peak_memory'])}"
