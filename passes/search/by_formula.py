"""by_formula: seconds and bytes of a candidate without its schedule.

Layers are priced once for each way of splitting them (`price_layers`); what candidates
of a mesh have in common is timed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from ..mesh import Mesh
from ..price.account import Account, once_a_rank, rank_memory
from ..price.candidate import Candidate
from ..price.cluster import Cluster
from ..price.estimate import join_stages, step_parts
from ..price.price_layers import LayerPrices, Prices, Way
from ..price.share import resting_bytes, share
from ..price.stage_seconds import StageSeconds, stage_seconds
from ..schedule.footprint import Footprint, rough_peak
from ..schedule.make_schedule import SCHEDULES
from ..search.balance_layers import balance_ranks
from ..search.candidates import Space


@dataclass(frozen=True)
class Timed:
    """What a stage's account is, for candidates that have its mesh and ZeRO in common:
    whole: that of a rank of the whole mesh, and what it keeps; seconds: of it; resting:
    see `resting_bytes`."""

    whole: Callable[[Account], tuple[Account, Footprint]]
    seconds: Callable[[Account], StageSeconds]
    resting: Callable[[Account], tuple[float, float]]


Timer = Callable[[Candidate], Timed]


def way_of(candidate: Candidate) -> Way:
    """How a candidate's layers are split and run."""
    c = candidate
    mesh, shares = layer_mesh(c.mesh), c.zero > 0
    return Way(mesh, c.recompute, c.halves, c.samples, shares, c.context_parallel)


def prices_of(candidate: Candidate, prices: Prices) -> LayerPrices:
    """Returns seconds and bytes of a candidate's layers."""
    return prices(way_of(candidate))


@cache
def layer_mesh(mesh: Mesh) -> Mesh:
    """The axes that a layer is compiled for."""
    axes = ((a, n) for a, n in mesh.stage_axes if n > 1)
    return Mesh(tuple((a, n) for a, n in axes if a not in mesh.data_axes))


def make_timer(cluster: Cluster) -> Timer:
    """`stage_seconds` on a cluster, for many candidates: what they have in common is
    timed once."""

    known: dict[tuple[Mesh, int, str], Timed] = {}

    def timed(candidate: Candidate) -> Timed:
        alike = candidate.mesh, candidate.shares, candidate.context_parallel
        if alike not in known:
            if any(mesh != candidate.mesh for mesh, *_ in known):
                known.clear()  # candidates of a mesh come in a row
            known[alike] = _timed(candidate, cluster)
        return known[alike]

    return timed


def _timed(alike: Candidate, cluster: Cluster) -> Timed:
    @cache
    def whole(account: Account) -> tuple[Account, Footprint]:
        whole_account = share(account, alike, cluster.device)
        return whole_account, whole_account.footprint

    @cache
    def seconds(account: Account) -> StageSeconds:
        return stage_seconds(whole(account)[0], alike.mesh, cluster)

    return Timed(whole, seconds, cache(lambda account: resting_bytes(account, alike)))


def least_bytes(
    candidate: Candidate,
    runs: int,
    costs: LayerPrices,
    timed: Timer,
    working: bool = True,
    times: float = 1.0,
) -> float:
    """No more than `rough` finds: what ranks hold of all layers, on average, and what
    the backward of a layer has alive beside that; or what it has alive anyway. working:
    without, prices with backwards whole hold for those in halves too. times: as many
    samples as prices are of, of which more residuals are gone where most is alive."""
    whole = costs.least(runs, _stages(candidate))
    most, beside = costs.least_alive[candidate.shares] if working else (0.0, 0.0)
    beside -= (times - 1) * costs.batch_residuals
    ranks, v = candidate.mesh.pipeline_ranks, candidate.stages_per_rank
    residuals = whole.residuals + (times - 1) * whole.batch_residuals
    each = max(residuals, whole.weight_residuals)
    # The last of them is in its backward, or in the half of it that is of weights.
    flying = max(0.0, residuals - each + beside * v * ranks)
    states, step = timed(candidate).resting(whole)
    average = (states + step + (flying + in_flight(candidate) * each) / v) / ranks
    return 0.97 * max(average, most / v)


def least_states(
    candidate: Candidate, runs: int, costs: LayerPrices, timed: Timer
) -> float:
    """The part of `least_bytes` that only the mesh and the stage of ZeRO decide."""
    states, _ = timed(candidate).resting(costs.least(runs, _stages(candidate)))
    return 0.97 * states / candidate.mesh.pipeline_ranks


def rough(
    candidate: Candidate,
    space: Space,
    prices: Prices,
    timed: Timer | None = None,
    limit: float = math.inf,
) -> tuple[float, float, Candidate] | None:
    """Seconds and bytes by formula, and the candidate with its layers; None if there
    are too few layers. timed: see `make_timer`. limit: of bytes; seconds of what takes
    more are infinite."""
    costs = prices_of(candidate, prices)
    of = (timed or make_timer(space.cluster))(candidate)
    layers = _balanced(candidate, space.runs, costs, of)
    if layers is None:
        return None
    candidate, placement = replace(candidate, layers=layers), candidate.placement
    shown = _shown(layers, placement)
    stages = [[costs.stage(*stage) for stage in own] for own in shown]
    both = [[of.whole(account) for account in own] for own in stages]
    kinds = [[account for account, _ in own] for own in both]
    if placement[0] == placement[-1]:
        kinds[:1] = once_a_rank(kinds[0], [0] * len(kinds[0]))
    most, peak = in_flight(candidate), 0.0
    for accounts, own in zip(kinds, both, strict=True):
        alive = rough_peak([footprint for _, footprint in own], most)
        peak = max(peak, sum(rank_memory(accounts, alive).values()))
    if peak > limit:
        return math.inf, peak, candidate
    took = [[of.seconds(account) for account in own] for own in stages]
    return rough_seconds(kinds, candidate, space.cluster, took), peak, candidate


def least_seconds(
    candidate: Candidate, runs: int, costs: LayerPrices, timed: Timer
) -> float:
    """No more than `rough` finds, by prices of the same layers with nothing computed
    again, or with backwards whole: what microbatches take of ranks on average."""
    took = timed(candidate).seconds(costs.least(runs, _stages(candidate))).total
    return 0.999 * candidate.microbatches * took / candidate.mesh.pipeline_ranks


def least_computing(candidate: Candidate, runs: int, costs: LayerPrices) -> float:
    """The part of `least_seconds` in which nothing is waited for, found at once."""
    parts = costs.least(runs, _stages(candidate)).microbatch.values()
    seconds = sum(part.seconds for part in parts)
    return 0.999 * candidate.microbatches * seconds / candidate.mesh.pipeline_ranks


@lru_cache(maxsize=4096)  # candidates that differ in what they shard ask for the same
def _shown(
    layers: tuple[int, ...], placement: tuple[int, ...]
) -> list[list[tuple[bool, int, bool]]]:
    """The stages of the first, an inner, and the last pipeline rank, of those that
    there are: (if it is the first, its layers, if it is the last). The inner rank is
    the one with the most layers."""
    last, counts = len(layers) - 1, [0] * (max(placement) + 1)
    for rank, count in zip(placement, layers, strict=True):
        counts[rank] += count
    inner = range(1, len(counts) - 1)
    heaviest = max(inner, key=counts.__getitem__, default=0)
    return [
        [(i == 0, layers[i], i == last) for i, r in enumerate(placement) if r == rank]
        for rank in sorted({0, heaviest, len(counts) - 1})
    ]


def rough_seconds(
    kinds: Sequence[Sequence[Account]],
    candidate: Candidate,
    cluster: Cluster,
    took: Sequence[Sequence[StageSeconds]],
) -> float:
    """Estimates a step by formula. kinds: stages of the first, an inner and the last
    pipeline rank, of those that there are, as ranks of the whole mesh have them. took:
    their seconds."""
    ranks, m = candidate.mesh.pipeline_ranks, candidate.microbatches
    inner = took[min(1, len(took) - 1)]
    typical = inner[0]
    # How long it takes to fill and drain the pipeline, see
    # `passes.schedule.make_schedule`.
    fill = typical.forward + typical.backward
    # Weight halves that each rank puts off, into the others' gaps.
    named = SCHEDULES.get(candidate.schedule)
    put_off = named.put_off if named else None
    fill += typical.weight if put_off is None else -put_off * typical.weight
    fill = max(0.0, fill) + 2 * typical.send
    busy = [sum(t.total for t in own) for own in took]
    seconds = m * max(busy) + (ranks - 1) * fill
    # Where microbatches are fewer than ranks, each rank waits for the first of them to
    # come round before its next stage has any.
    round_trip = typical.total + 2 * typical.send
    seconds += max(0, ranks - m) * (candidate.stages_per_rank - 1) * round_trip
    # Ranks that share cores are no faster than these do all the work.
    ends = busy[0] + busy[-1] * (ranks > 1)
    every = ends + (ranks - 2) * sum(t.total for t in inner) * (ranks > 2)
    contention = cluster.contention(candidate.mesh)
    seconds = max(seconds, m * every * contention.processes / contention.cores)
    known = {
        a: t for own in zip(kinds, took, strict=True) for a, t in zip(*own, strict=True)
    }
    once = {
        a: step_parts(a, candidate.mesh, cluster, t, candidate.halves)
        for a, t in known.items()
    }
    # Stages of a rank take turns, each with as many microbatches as there are ranks.
    turn = min(ranks, m) - 1
    joined = (
        join_stages(
            [once[a] for a in own],
            {
                "parameters": [turn * t.forward for t in of],
                "gradients": [turn * (t.backward + t.weight) for t in of],
            },
        )
        for own, of in zip(kinds, took, strict=True)
    )
    return seconds + max(sum(terms.values()) for terms in joined)


def _stages(candidate: Candidate) -> int:
    return candidate.mesh.pipeline_ranks * candidate.stages_per_rank


def in_flight(candidate: Candidate) -> int:
    """Counts microbatches in flight at most, on all stages of a rank together."""
    ranks, m = candidate.mesh.pipeline_ranks, candidate.microbatches
    v = candidate.stages_per_rank
    named = SCHEDULES.get(candidate.schedule)
    return min(m * v, named.in_flight(ranks, m, v) if named else v * ranks)


def _balanced(
    candidate: Candidate, runs: int, prices: LayerPrices, timed: Timed
) -> tuple[int, ...] | None:
    """Layers of each stage, so that the slowest rank is as fast as can be."""
    stages = _stages(candidate)
    if stages == 1:
        return (runs,)
    if stages > runs:
        return None
    if runs < 3:
        return (1,) * stages
    layer = timed.seconds(prices.stage(False, 1, False)).total
    before = timed.seconds(prices.stage(True, 1, False)).total - layer
    after = timed.seconds(prices.stage(False, 1, True)).total - layer
    ends = max(0.0, before), max(0.0, after)
    return balance_ranks(runs, candidate.placement, layer, *ends)
