"""What a run prints."""

from __future__ import annotations

import json
import sys
import time

from torch import Tensor

from autopar.training.evaluation import perplexity
from autopar.training.options import RunOptions


class Progress:
    """One live line on a terminal; else a line every PAUSE seconds, or JSON lines.

    Only for a line a loss is read, which waits for a GPU. done: steps made before.
    tokens: in a step; how many a second, since the line before.
    """

    LIVE, PAUSE = 0.1, 2.0

    def __init__(self, options: RunOptions, done: int, tokens: int) -> None:
        self.options, self.tokens = options, tokens
        self.live = sys.stdout.isatty() and not options.json
        self.pause = 0.0 if options.json else self.LIVE if self.live else self.PAUSE
        self.printed = float("-inf")
        self.began, self.shown = time.perf_counter(), done

    def show(self, step: int, loss: Tensor, reference: float | None) -> None:
        last = step == self.options.steps
        if not last and time.monotonic() - self.printed < self.pause:
            return
        self.printed, value = time.monotonic(), loss.item()
        tokens = self.tokens * (step - self.shown)
        speed = tokens / (time.perf_counter() - self.began)
        self._print(step, value, reference, speed)
        self.began, self.shown = time.perf_counter(), step

    def show_evaluation(self, step: int, loss: float) -> None:
        """Of held-out data, on a line of its own."""
        found = perplexity(loss)
        if self.options.json:
            row = {"step": step, "eval_loss": loss, "eval_perplexity": found}
            print(json.dumps(row), flush=True)
            return
        if self.live and step != self.options.steps:
            print()
        print(f"step {step}  held out: loss {loss:.5f}  perplexity {found:,.2f}")

    def _print(
        self, step: int, loss: float, reference: float | None, speed: float
    ) -> None:
        last = step == self.options.steps
        if self.options.json:
            row = {"step": step, "loss": loss, "tokens_per_second": speed}
            if reference is not None:
                row["reference_loss"] = reference
            print(json.dumps(row), flush=True)
            return
        text = f"step {step}/{self.options.steps}  loss {loss:.5f}"
        if reference is not None:
            text += f"  single device {reference:.5f}"
        text += f"  {speed:,.0f} tokens/s"
        if self.live:
            print(f"\r{text:<78}", end="\n" if last else "", flush=True)
        else:
            print(text, flush=True)
