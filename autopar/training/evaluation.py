"""Evaluation on tokens that training never sees: the last part of the data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from autopar.passes.errors import AutoparError
from autopar.step import Step

if TYPE_CHECKING:
    from autopar.training.feed import Feed
    from autopar.training.options import RunOptions


class EvaluationError(AutoparError):
    """An evaluation that cannot be."""


def check_evaluation(options: RunOptions) -> None:
    """Raises EvaluationError for options that contradict each other."""
    if options.eval_data and not options.eval_every:
        raise EvaluationError(
            "--eval-data is there, but nobody says when to evaluate",
            fix="add --eval-every 100, or leave --eval-data out",
        )
    if options.eval_data and options.eval_fraction:
        raise EvaluationError(
            "--eval-data and --eval-fraction both say what to evaluate on",
            fix="leave one of them out",
        )
    if options.eval_every and not (options.held_out or options.eval_data):
        raise EvaluationError(
            "--eval-every has nothing to evaluate on: --eval-fraction is 0",
            fix="use --eval-fraction 0.1, or leave --eval-every out",
        )


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
        """Returns the loss, without dropout, and its perplexity; and those of averaged
        weights, if the run has some. All ranks must call it."""
        found = _row("eval", self._loss(step))
        if step.has_ema:
            with step.ema.applied():
                found |= _row("ema_eval", self._loss(step))
        return found

    def _loss(self, step: Step) -> float:
        if not self.options.eval_batches:
            return self._loss_of_all(step)
        batches = range(self.options.eval_batches)
        losses = [step.evaluate(**self.feed.batch(i)) for i in batches]
        return torch.stack(losses).double().mean().item()

    def _loss_of_all(self, step: Step) -> float:
        """The mean over all samples, none of which overlaps with another."""
        runs = list(runs_of(self.feed.count(), self.feed.samples, step.data_ranks))
        losses = [step.evaluate(**self.feed.sequences(*run)) for run in runs]
        counts = torch.tensor([count for _, count in runs], dtype=torch.float64)
        return torch.stack(losses).double().cpu().dot(counts / counts.sum()).item()


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


def _row(name: str, loss: float) -> dict[str, float]:
    return {f"{name}_loss": loss, f"{name}_perplexity": perplexity(loss)}


def perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
