"""search: the plans that a cluster allows, and the fastest of those that fit.

Candidates are enumerated (`candidates`); layers are priced once for each way of
splitting them (`price_layers`). A formula ranks all candidates, the best of them are
run on paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from passes.errors import ShardingConflict
from passes.mesh import Mesh
from passes.price.candidate import Candidate
from passes.price.cluster import Cluster
from passes.price.estimate import (
    Estimate,
    StageSeconds,
    estimate,
    stage_seconds,
    step_parts,
)
from passes.price.estimate_memory import rank_memory
from passes.price.price import Account
from passes.price.price_layers import LayerPrices, Prices
from passes.search.balance_layers import balance_layers
from passes.search.candidates import ALIKE, Space, candidates, contexts
from passes.shard.query_groups import PAIR

HALVES = ("zb-h1", "zb-h2", "zb-v")
SHORTLIST = 12
# A plan that takes less than this share of the memory by formula does fit, and gains
# nothing by recomputation.
ROOMY = 0.9


@dataclass(frozen=True)
class Found:
    """best: estimates, fastest first. tried: candidates. nearest: if none fits, the
    one that is short of the least memory."""

    best: tuple[Estimate, ...]
    tried: int
    nearest: Estimate | None


Watch = Callable[[int, int], None]
Timer = Callable[[Account, Candidate], StageSeconds]


def search(
    space: Space, prices: Prices, watch: Watch = lambda done, total: None
) -> Found:
    """The fastest plans that fit into the devices' memory.

    watch: called after each candidate with how many are done, and how many there are.
    """
    limit = space.cluster.device.memory
    ranked: list[tuple[float, float, int, Candidate]] = []
    every, timed = list(candidates(space)), make_timer(space.cluster)
    roomy: set[Candidate] = set()
    for done, candidate in enumerate(every, 1):
        needless = replace(candidate, recompute="none") in roomy
        priced = None if needless else rough(candidate, space, prices, timed)
        watch(done, len(every))
        if priced is not None:
            seconds, peak, complete = priced
            ranked.append((seconds, peak, len(ranked), complete))
            if candidate.recompute == "none" and peak <= ROOMY * limit:
                roomy.add(candidate)
    fitting = sorted(r for r in ranked if r[1] <= limit)
    best = []
    for *_, candidate in fitting[: 3 * SHORTLIST]:
        found = run_on_paper(candidate, prices, space.cluster)
        if found.peak <= limit:
            best.append(found)
        if len(best) == SHORTLIST:
            break
    best = simplest_first(best + _in_other_contexts(best, space, prices))
    nearest = None
    if not best and ranked:
        closest = min(ranked, key=lambda r: (r[1], r[0]))[-1]
        nearest = run_on_paper(closest, prices, space.cluster)
    return Found(tuple(best), len(ranked), nearest)


def _in_other_contexts(
    best: Sequence[Estimate], space: Space, prices: Prices
) -> list[Estimate]:
    """Plans that fit, with attention on cp working otherwise than in the best ones."""
    found = []
    for e in best:
        for context in contexts(space, e.candidate.mesh)[1:]:
            candidate = replace(e.candidate, context_parallel=context)
            try:
                tried = run_on_paper(candidate, prices, space.cluster)
            except ShardingConflict:
                continue  # a ring is not for every attention
            if tried.peak <= space.cluster.device.memory:
                found.append(tried)
    return found


def simplest_first(estimates: list[Estimate]) -> list[Estimate]:
    """Fastest first; but the simplest of those that are as fast, to within `ALIKE`,
    comes before them all."""
    ordered = sorted(estimates, key=lambda e: e.seconds)
    if not ordered:
        return []
    alike = [e for e in ordered if e.seconds <= ordered[0].seconds * (1 + ALIKE)]
    first = min(alike, key=lambda e: (complexity(e.candidate), e.seconds))
    return [first, *(e for e in ordered if e is not first)]


def complexity(candidate: Candidate) -> tuple[int, ...]:
    """Orders candidates: what is simple comes first."""
    return (
        sum(n > 1 for _, n in candidate.mesh.axes),
        candidate.recompute != "none",
        candidate.stages_per_rank,
        candidate.schedule != "1f1b",
        candidate.zero,
        candidate.context_parallel != "gather",
        candidate.labelled,
    )


def run_on_paper(candidate: Candidate, prices: Prices, cluster: Cluster) -> Estimate:
    return estimate(accounts_of(candidate, prices), candidate, cluster)


def accounts_of(candidate: Candidate, prices: Prices) -> list[Account]:
    """Of each stage, of one microbatch."""
    return stages_of(candidate.layers, _prices_of(candidate, prices))


def stages_of(layers: Sequence[int], prices: LayerPrices) -> list[Account]:
    """Of stages of so many layers."""
    last = len(layers) - 1
    return [prices.stage(i == 0, runs, i == last) for i, runs in enumerate(layers)]


def stage_account(
    candidate: Candidate, prices: Prices, first: bool, runs: int, last: bool
) -> Account:
    return _prices_of(candidate, prices).stage(first, runs, last)


def _prices_of(candidate: Candidate, prices: Prices) -> LayerPrices:
    return prices(
        layer_mesh(candidate.mesh),
        candidate.recompute,
        candidate.schedule in HALVES,
        candidate.samples,
        candidate.zero > 0,
        candidate.context_parallel,
    )


def layer_mesh(mesh: Mesh) -> Mesh:
    """The axes that a layer is compiled for."""
    return Mesh(
        tuple((a, n) for a, n in mesh.axes if a in ("cp", "ep", *PAIR) and n > 1)
    )


# --- A formula for each ------------------------------------------------------------


def make_timer(cluster: Cluster) -> Timer:
    """`stage_seconds` on a cluster, for many candidates: what they have in common is
    timed once."""

    @cache
    def timed(account: Account, alike: Candidate) -> StageSeconds:
        return stage_seconds(account, alike, cluster)

    def seconds(account: Account, candidate: Candidate) -> StageSeconds:
        # Only how shares of parameters are gathered depends on a stage's layers.
        gathers = candidate.zero >= 2
        alike = replace(
            candidate,
            samples=1,
            microbatches=1,
            schedule="1f1b",
            stages_per_rank=1,
            recompute="none",
            layers=candidate.layers if gathers else (),
        )
        return timed(account, alike)

    return seconds


def rough(
    candidate: Candidate, space: Space, prices: Prices, timed: Timer | None = None
) -> tuple[float, float, Candidate] | None:
    """Seconds and bytes by formula, and the candidate with its layers; None if there
    are too few layers. timed: see `make_timer`."""
    timed = timed or make_timer(space.cluster)
    layers = _balanced(candidate, space, prices, timed)
    if layers is None:
        return None
    candidate = replace(candidate, layers=layers)
    # Of stages inside of the pipeline, the second is as slow as any.
    inside = (False, max(layers[1:-1], default=0), False)
    kinds = [
        stage_account(candidate, prices, first, runs, last)
        for first, runs, last in (
            (True, layers[0], len(layers) == 1),
            *((inside,) if len(layers) > 2 else ()),
            *(((False, layers[-1], True),) if len(layers) > 1 else ()),
        )
    ]
    took = [timed(account, candidate) for account in kinds]
    seconds = rough_seconds(kinds, candidate, space.cluster, took)
    v, most = candidate.stages_per_rank, in_flight(candidate)
    peak = 0.0
    for a, t in zip(kinds, took, strict=True):
        alive = t.footprint.most(most)
        peak = max(peak, sum(rank_memory([a] * v, candidate, alive).values()))
    return seconds, peak, candidate


def rough_seconds(
    kinds: Sequence[Account],
    candidate: Candidate,
    cluster: Cluster,
    took: Sequence[StageSeconds] | None = None,
) -> float:
    """Of a step, by formula. kinds: of the first, an inner and the last stage, of those
    that there are. took: their seconds, if they are known."""
    took = took or [stage_seconds(a, candidate, cluster) for a in kinds]
    ranks = candidate.mesh.axis_size("pp")
    v, m = candidate.stages_per_rank, candidate.microbatches
    typical = took[min(1, len(took) - 1)]
    # How long it takes to fill and drain the pipeline, see
    # `passes.schedule.make_schedule`.
    fill = typical.forward + typical.backward
    # Weight halves that each rank puts off, into the others' gaps.
    put_off = {"zb-h1": 1, "zb-h2": 2, "zb-v": 2}.get(candidate.schedule)
    fill += typical.weight if put_off is None else -put_off * typical.weight
    fill = max(0.0, fill) + 2 * typical.send
    seconds = m * v * max(map(_total, took)) + (ranks - 1) * fill
    # Ranks that share cores are no faster than these do all the work.
    every = _total(took[0]) + _total(took[-1]) + (ranks * v - 2) * _total(typical)
    crowd = cluster.crowd(candidate.mesh)
    seconds = max(seconds, m * every * crowd.processes / crowd.cores)
    return seconds + max(sum(step_parts(a, candidate, cluster).values()) for a in kinds)


def in_flight(candidate: Candidate) -> int:
    """Of a stage's microbatches, at most, on all stages of a rank together."""
    ranks, m = candidate.mesh.axis_size("pp"), candidate.microbatches
    v = candidate.stages_per_rank
    most = {
        "naive": 1,
        "gpipe": m,
        "zb-h2": 2 * ranks - 1,
        "interleaved": v * ranks + ranks - 1,
        "looped-bfs": m * v,
    }
    return min(m * v, most.get(candidate.schedule, v * ranks))


def _total(seconds: StageSeconds) -> float:
    return seconds.forward + seconds.backward + seconds.weight


def _balanced(
    candidate: Candidate, space: Space, prices: Prices, timed: Timer
) -> tuple[int, ...] | None:
    """Layers of each stage, so that the slowest is as fast as can be."""
    stages = candidate.mesh.axis_size("pp") * candidate.stages_per_rank
    if stages == 1:
        return (space.runs,)

    def seconds(first: bool, runs: int, last: bool) -> float:
        account = stage_account(candidate, prices, first, runs, last)
        return _total(timed(account, candidate))

    if stages > space.runs:
        return None
    if space.runs < 3:
        return (1,) * stages
    layer = seconds(False, 1, False)
    before, after = seconds(True, 1, False) - layer, seconds(False, 1, True) - layer
    return balance_layers(space.runs, stages, layer, max(0, before), max(0, after))
