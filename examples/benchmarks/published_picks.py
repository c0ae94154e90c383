"""The plans that we pick among the Ultra-Scale sweep's runs, and what they lose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.passes.price.candidate import Candidate
from autopar.passes.search.candidates import ALIKE
from autopar.passes.search.search import complexity
from examples.benchmarks.published_fit import rank_correlation
from examples.benchmarks.published_sweep import Constants, Run, runs


@dataclass(frozen=True)
class Picked:
    """A model's runs on so many nodes: what we pick, what it loses to the best
    that was measured, and how well the order is predicted: rank correlation of all,
    and of those at least half as fast as the best."""

    model: str
    nodes: int
    count: int
    pick: Candidate
    best: Candidate
    regret: float
    correlation: float
    faster: float


def picked(model: str, constants: Constants) -> list[Picked]:
    picks = []
    for nodes in sorted({run.nodes for run in runs(model)}):
        own = [run for run in runs(model) if run.nodes == nodes]
        predicted = [run.predict(constants) for run in own]
        measured = [run.throughput for run in own]
        ours = _pick(own, predicted)
        both = zip(predicted, measured, strict=True)
        half = [(x, y) for x, y in both if y > max(measured) / 2]
        fastest = own[measured.index(max(measured))]
        picks.append(
            Picked(
                model,
                nodes,
                len(own),
                ours.candidate,
                fastest.candidate,
                1 - ours.throughput / fastest.throughput,
                rank_correlation(predicted, measured),
                rank_correlation(*zip(*half, strict=True)),
            )
        )
    return picks


def _pick(own: Sequence[Run], predicted: Sequence[float]) -> Run:
    """What the planner would choose of these: the simplest of those that fit and are
    as fast, to within what estimates can tell."""
    fitting = [(x, run) for x, run in zip(predicted, own, strict=True) if run.fits]
    fastest = max(x for x, _ in fitting)
    alike = [(x, run) for x, run in fitting if x * (1 + ALIKE) >= fastest]
    return min(alike, key=lambda pair: (complexity(pair[1].candidate), -pair[0]))[1]
