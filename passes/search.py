"""search: the plans that a cluster allows, and the fastest of those that fit.

How the devices factor into axes, samples in a microbatch, layers in each stage, the
schedule, ZeRO's stage and what is recomputed are enumerated; layers are priced once for
each way of splitting them (`price_layers`). A formula ranks all candidates, the best of
them are run on paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from passes.balance_layers import balance_layers
from passes.cluster import Cluster
from passes.estimate import (
    Candidate,
    Estimate,
    StageSeconds,
    estimate,
    rank_memory,
    stage_seconds,
    step_parts,
)
from passes.mesh import Mesh
from passes.price import Account
from passes.price_layers import LayerPrices

# (mesh axes that split a layer, what is recomputed, whether the backward has halves,
# samples) -> prices
Prices = Callable[[Mesh, str, bool, int], LayerPrices]

SCHEDULES = ("1f1b", "interleaved", "zb-h1")
HALVES = ("zb-h1", "zb-h2", "zb-v")
STAGES_PER_RANK = (2, 3, 4, 6, 8)
RECOMPUTE = ("none", "selective", "full")
SHORTLIST = 12
ALIKE = 0.05  # estimates that differ by less do not say which is faster


@dataclass(frozen=True)
class Space:
    """What a search may choose from.

    batch: samples of a step. runs: of layers in the model. axes: of a layer -> the
    sizes that it may be split into. mesh: axes whose sizes are decided already.
    """

    cluster: Cluster
    batch: int
    runs: int
    tp: tuple[int, ...]
    cp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    mesh: Mesh | None = None
    schedules: tuple[str, ...] = SCHEDULES
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE


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
    for done, candidate in enumerate(every, 1):
        priced = rough(candidate, space, prices, timed)
        watch(done, len(every))
        if priced is not None:
            seconds, peak, complete = priced
            ranked.append((seconds, peak, len(ranked), complete))
    fitting = sorted(r for r in ranked if r[1] <= limit)
    best = []
    for *_, candidate in fitting[: 3 * SHORTLIST]:
        found = run_on_paper(candidate, prices, space.cluster)
        if found.peak <= limit:
            best.append(found)
        if len(best) == SHORTLIST:
            break
    best = _simplest_first(best)
    nearest = None
    if not best and ranked:
        closest = min(ranked, key=lambda r: (r[1], r[0]))[-1]
        nearest = run_on_paper(closest, prices, space.cluster)
    return Found(tuple(best), len(ranked), nearest)


def _simplest_first(estimates: list[Estimate]) -> list[Estimate]:
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
    )


def run_on_paper(candidate: Candidate, prices: Prices, cluster: Cluster) -> Estimate:
    return estimate(accounts_of(candidate, prices), candidate, cluster)


def accounts_of(candidate: Candidate, prices: Prices) -> list[Account]:
    """Of each stage, of one microbatch."""
    last = len(candidate.layers) - 1
    return [
        stage_account(candidate, prices, i == 0, runs, i == last)
        for i, runs in enumerate(candidate.layers)
    ]


def stage_account(
    candidate: Candidate, prices: Prices, first: bool, runs: int, last: bool
) -> Account:
    halves = candidate.schedule in HALVES
    mesh = layer_mesh(candidate.mesh)
    found = prices(mesh, candidate.recompute, halves, candidate.samples)
    return found.stage(first, runs, last)


def layer_mesh(mesh: Mesh) -> Mesh:
    """The axes that a layer is compiled for."""
    return Mesh(
        tuple((a, n) for a, n in mesh.axes if a in ("cp", "ep", "tp") and n > 1)
    )


# --- What there is to choose from ---------------------------------------------------


def candidates(space: Space) -> Iterator[Candidate]:
    """Every combination, but for the layers of each stage."""
    for mesh in meshes(space):
        replicas = mesh.axis_size("dp") * mesh.axis_size("ep")
        if space.batch % replicas:
            continue
        for samples in _divisors(space.batch // replicas):
            microbatches = space.batch // replicas // samples
            for schedule, per_rank in _pipelines(space, mesh, microbatches):
                for zero in space.zero if mesh.axis_size("dp") > 1 else (0,):
                    for recompute in space.recompute:
                        yield Candidate(
                            mesh,
                            samples,
                            microbatches,
                            schedule,
                            per_rank,
                            zero,
                            recompute,
                            (),
                        )


def meshes(space: Space) -> Iterator[Mesh]:
    """Ways to factor the devices; tp innermost, where links are fastest."""
    fixed = dict(space.mesh.axes) if space.mesh else {}
    for tp in _allowed(space.tp, fixed.get("tp")):
        for cp in _allowed(space.cp, fixed.get("cp")):
            for ep in _allowed(space.ep, fixed.get("ep")):
                rest, left = divmod(space.cluster.devices, tp * cp * ep)
                if left or not rest:
                    continue
                for pp in _divisors(rest):
                    dp = rest // pp
                    if pp > space.runs or fixed.get("pp", pp) != pp:
                        continue
                    if fixed.get("dp", dp) == dp:
                        sizes = (
                            ("pp", pp),
                            ("dp", dp),
                            ("cp", cp),
                            ("ep", ep),
                            ("tp", tp),
                        )
                        yield Mesh(tuple((a, n) for a, n in sizes if n > 1))


def _allowed(sizes: tuple[int, ...], fixed: int | None) -> tuple[int, ...]:
    return sizes if fixed is None else (fixed,)


def _pipelines(
    space: Space, mesh: Mesh, microbatches: int
) -> Iterator[tuple[str, int]]:
    """(schedule, stages per rank)."""
    ranks = mesh.axis_size("pp")
    if ranks == 1:
        yield "1f1b", 1
        return
    for schedule in space.schedules:
        if schedule != "interleaved":
            yield schedule, 1
        elif microbatches % ranks == 0:
            for v in STAGES_PER_RANK:
                if ranks * v <= space.runs:
                    yield schedule, v


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(i for i in range(1, number + 1) if number % i == 0)


# --- A formula for each ------------------------------------------------------------


def make_timer(cluster: Cluster) -> Timer:
    """`stage_seconds` on a cluster, for many candidates: what they have in common is
    timed once."""

    @cache
    def timed(account: Account, alike: Candidate) -> StageSeconds:
        return stage_seconds(account, alike, cluster)

    def seconds(account: Account, candidate: Candidate) -> StageSeconds:
        # Only how shares of parameters are gathered depends on a stage's layers.
        gathers = candidate.zero == 3
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
    ranks = candidate.mesh.axis_size("pp")
    v, m = candidate.stages_per_rank, candidate.microbatches
    in_flight = min(m * v, v * ranks + ranks - 1) if v > 1 else min(m, ranks)
    peak = 0.0
    for a, t in zip(kinds, took, strict=True):
        most = t.footprint.most(in_flight)
        peak = max(peak, sum(rank_memory([a] * v, candidate, most).values()))
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
    # How long it takes to fill and drain the pipeline, see `passes.make_schedule`.
    fill = typical.forward + typical.backward
    fill += -typical.weight if candidate.schedule in HALVES else typical.weight
    fill = max(0.0, fill) + 2 * typical.send
    seconds = m * v * max(map(_total, took)) + (ranks - 1) * fill
    # Ranks that share cores are no faster than these do all the work.
    every = _total(took[0]) + _total(took[-1]) + (ranks * v - 2) * _total(typical)
    crowd = cluster.crowd(candidate.mesh)
    seconds = max(seconds, m * every * crowd.processes / crowd.cores)
    return seconds + max(sum(step_parts(a, candidate, cluster).values()) for a in kinds)


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
