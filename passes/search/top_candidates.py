"""top_candidates: what no formula can rank is tried on paper, for the best plans.

Attention that works otherwise, pipelines whose parameters are shared within nodes,
stages of a rank that are cut otherwise, and schedules made for what stages take: of a
pipeline's ends the formula of `passes.search.search` has but the length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import ShardingConflict
from ..plan import AUTO
from ..price.candidate import Candidate
from ..price.estimate import Estimate
from ..schedule.schedule import ScheduleError
from ..search.balance_layers import balance_layers
from ..search.candidates import Space, contexts, hybrids

MOST = 3  # of the best plans get a schedule of their own
ACTIONS = 6_000  # of a step, at most: to make a schedule takes time by them
FOR_MORE = 1e-3  # of a step: what a plan must gain to be one of the best

# A candidate on paper; None: it does not fit.
Fit = Callable[[Candidate], Estimate | None]


def other_ways(best: Sequence[Estimate], space: Space, fit: Fit) -> list[Estimate]:
    """The best plans with attention on cp working otherwise; and of pipelines, with
    parameters shared within nodes."""
    estimates = []
    for c in (e.candidate for e in best):
        ways = [replace(c, context_parallel=x) for x in contexts(space, c.mesh)[1:]]
        ways += [replace(c, mesh=x) for x in hybrids(space, c.mesh) if c.zero]
        for way in ways:
            try:
                tried = fit(way)
            except ShardingConflict:
                continue  # a ring is not for every attention
            if tried is not None:
                estimates.append(tried)
    return estimates


def best_cuts(best: Sequence[Estimate], fit: Fit) -> list[Estimate]:
    """The same plans; where that is faster, each of a rank's stages is balanced by
    itself.

    Usually the stages of a rank balance its work together, see `balance_ranks`; with
    few microbatches each stage's own seconds matter more.
    """
    return [_better_cut(e, fit) for e in best]


def _better_cut(e: Estimate, fit: Fit) -> Estimate:
    layers = _stage_by_stage(e) if e.candidate.stages_per_rank > 1 else None
    if layers is None or layers == e.candidate.layers:
        return e
    other = fit(replace(e.candidate, layers=layers))
    return other if other is not None and other.seconds < e.seconds else e


def _stage_by_stage(e: Estimate) -> tuple[int, ...] | None:
    """Layers of each stage by the seconds that an inner stage and both ends took."""
    layers, took = e.candidate.layers, [stage.total for stage in e.stages]
    layer = took[1] / layers[1]
    before = took[0] - layer * layers[0]
    after = took[-1] - layer * layers[-1]
    ends = max(0.0, before), max(0.0, after)
    return balance_layers(sum(layers), len(layers), layer, *ends)


def made_schedules(best: Sequence[Estimate], fit: Fit) -> list[Estimate]:
    """The best plans with pipelines, by schedules made for what their stages take and
    for the memory that is left, where these are faster."""
    open_to: dict[Candidate, Estimate] = {}
    for e in sorted(best, key=lambda e: e.seconds):
        c = e.candidate
        actions = 3 * c.microbatches * len(c.layers)
        if c.mesh.pipeline_ranks > 1 and actions <= ACTIONS:
            open_to.setdefault(replace(c, schedule=AUTO), e)
    estimates = []
    for candidate, e in list(open_to.items())[:MOST]:
        try:
            made = fit(candidate)
        except ScheduleError:
            continue  # in halves not even one microbatch at a time fits
        if made is not None and made.seconds < e.seconds * (1 - FOR_MORE):
            estimates.append(made)
    return estimates
