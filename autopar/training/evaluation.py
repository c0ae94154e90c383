"""Evaluation on tokens that training never sees: the last part of the data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from autopar.step import Step
from autopar.training.data.feed import Feed
from autopar.training.options import RunOptions
from autopar.training.reports.metrics import METRIC


class Evaluation:
    """The mean loss of some batches of held-out data, the same batches each time."""

    def __init__(self, held_out: Feed, options: RunOptions) -> None:
        """Raises DataError, before anything is trained, where no sequence fits."""
        self.feed, self.options = held_out, options
        if options.eval_every:
            held_out.batch(0)
            if not options.eval_batches:
                held_out.count()

    def is_due(self, done: int) -> bool:
        """Whether to evaluate after so many steps."""
        every = self.options.eval_every
        return bool(every) and (done % every == 0 or done == self.options.steps)

    def losses(self, step: Step) -> dict[str, float]:
        """Returns the loss of eval mode, its perplexity, and `Step.metrics`; and
        those of averaged weights, if the run has some. All ranks must call it."""
        row = self._row(step, "eval")
        if step.has_ema:
            with step.ema.applied():
                row |= self._row(step, "ema_eval")
        return row

    def _row(self, step: Step, name: str) -> dict[str, float]:
        """The means over all samples, none of which overlaps with another."""
        scalars, counts = [], []
        for batch, count in self._batches(step):
            loss = step.evaluate(**batch)
            scalars.append(torch.stack([loss.double(), *step.metrics.values()]))
            counts.append(count)
        shares = torch.tensor(counts, dtype=torch.float64) / sum(counts)
        loss, *others = (shares @ torch.stack(scalars).cpu()).tolist()
        row = {f"{name}_loss": loss, f"{name}_perplexity": perplexity(loss)}
        metrics = zip(step.metrics, others, strict=True)
        return row | {f"{name}_{METRIC}{key}": value for key, value in metrics}

    def _batches(self, step: Step) -> Iterator[tuple[Mapping[str, Tensor], int]]:
        """Yields (batch, number of samples to count) to evaluate."""
        if self.options.eval_batches:
            for i in range(self.options.eval_batches):
                yield self.feed.batch(i), self.feed.samples
            return
        for run in runs_of(self.feed.count(), self.feed.samples, step.data_ranks):
            yield self.feed.sequences(*run), run[1]


def runs_of(samples: int, batch: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Batches as first sample and count, of three counts at most, so that three
    programs do: whole ones, then what divides over the ranks that share a batch, then
    the rest one by one."""
    first = 0
    while first < samples:
        left = samples - first
        count = batch if left >= batch else left // ranks * ranks or 1
        yield first, count
        first += count


def perplexity(loss: float) -> float:
    """Returns exp(loss); inf where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
