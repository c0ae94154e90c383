"""search: the plans that a cluster allows, and the fastest of those that fit.

Candidates are enumerated (`candidates`); layers are priced once for each way of
splitting them (`price_layers`). A formula ranks all candidates, the best of them are
run on paper.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

from ..mesh import CONTEXT_AXES, TENSOR_AXES, Mesh
from ..plan import AUTO
from ..price.account import Account
from ..price.candidate import Candidate
from ..price.cluster import Cluster
from ..price.estimate import Estimate, estimate, estimate_within
from ..price.price_layers import LayerPrices, Prices, Way
from ..schedule.make_schedule import USUAL_SCHEDULE
from ..search.by_formula import (
    layer_mesh,
    least_bytes,
    least_computing,
    least_seconds,
    least_states,
    make_timer,
    prices_of,
    rough,
    way_of,
)
from ..search.candidates import ALIKE, Space, candidates
from ..search.recompute_whole import with_whole_layers
from ..search.top_candidates import Fit, best_cuts, made_schedules, other_ways

SHORTLIST = 12
TRIED = 3 * SHORTLIST  # on paper at most, if one of them fits
SURE = 3 * SHORTLIST // 2  # that fit by formula: then mostly `SHORTLIST` do on paper
# A plan that takes less than this share of the memory by formula does fit, and gains
# nothing by recomputation.
ROOMY = 0.9


class Priced(NamedTuple):
    """A candidate as text, the seconds of its step, bytes of a rank at its peak."""

    candidate: str
    seconds: float
    peak: float


@dataclass(frozen=True)
class Ranking:
    """best: estimates, fastest first. tried: candidates. nearest: if none fits, the
    one that is short of the least memory. priced: all whose seconds were found by the
    formula, fastest first, of which the best were run on paper then."""

    best: tuple[Estimate, ...]
    tried: int
    nearest: Estimate | None
    priced: tuple[Priced, ...] = ()


Watch = Callable[[int, int], None]


def search(
    space: Space, prices: Prices, watch: Watch = lambda done, total: None
) -> Ranking:
    """The fastest plans that fit into the devices' memory.

    watch: called after each candidate with how many are done, and how many there are.
    """
    every = list(candidates(space))
    ranked = Ranked(space, prices)
    for done, number in enumerate(_order(every), 1):
        ranked.add(number, every[number])
        watch(done, len(every))

    @cache
    def fit(candidate: Candidate) -> Estimate | None:
        accounts = accounts_of(candidate, prices)
        memory = space.cluster.device.memory
        return estimate_within(memory, accounts, candidate, space.cluster)

    best = ranked.shortlist(fit)
    best += other_ways(best, space, fit)
    best = best_cuts(best, fit)
    if len(space.schedule) > 1:
        best += made_schedules(best, fit)
    best = simplest_first(best)
    if best:
        best[0] = with_whole_layers(best[0], prices, space.cluster)
    nearest = None
    if not best and ranked.rows:
        closest = min(ranked.rows, key=lambda r: (r[1], r[0]))[-1]
        nearest = run_on_paper(closest, prices, space.cluster)
    priced = [Priced(str(c), s, peak) for s, peak, _, c in sorted(ranked.rows)]
    tried = len(every) - ranked.needless
    return Ranking(tuple(best), tried, nearest, tuple(priced))


def _order(every: Sequence[Candidate]) -> list[int]:
    """Numbers of candidates: first what bounds others' seconds, see `Ranked`; in a row
    those whose layers are split alike."""
    layers = {mesh: i for i, mesh in enumerate({layer_mesh(c.mesh): 0 for c in every})}

    def key(number: int) -> tuple[bool, bool, int, bool]:
        c = every[number]
        mesh = layers[layer_mesh(c.mesh)]
        return c.halves, c.recompute != "none", mesh, c.zero == 0

    return sorted(range(len(every)), key=key)


class Ranked:
    """Candidates by formula, those that may be among the fastest that fit.

    To price layers takes long. So backwards in halves, and what is computed again, are
    not priced for candidates that would be too slow without, even if their pipelines
    were never idle.

    rows: (seconds, bytes, number, candidate with its layers). needless: how many
    compute again what there is room for.
    """

    def __init__(self, space: Space, prices: Prices) -> None:
        self.space, self.prices = space, prices
        self.limit = space.cluster.device.memory
        self.timed = make_timer(space.cluster)
        self.rows: list[tuple[float, float, int, Candidate]] = []
        self.needless = 0
        self._roomy: set[object] = set()
        self._hopeless: list[tuple[int, Candidate]] = []
        self._slow: list[tuple[int, Candidate]] = []
        self._fastest: list[float] = []  # seconds of those that fit
        self._sure: float = SURE
        self._priced: defaultdict[object, dict[Mesh, None]] = defaultdict(dict)
        self._nearest: dict[object, tuple[int, Mesh] | None] = {}
        self._too_large: set[tuple[Mesh, int]] = set()  # whatever else is decided

    def add(self, number: int, candidate: Candidate) -> None:
        """Prices a candidate, or sets it aside if it cannot be among the best."""
        if candidate.recompute != "none" and _but_recompute(candidate) in self._roomy:
            self.needless += 1
        elif (candidate.mesh, candidate.zero) in self._too_large:
            self._hopeless.append((number, candidate))
        elif self._is_slow(candidate):
            self._slow.append((number, candidate))
        elif self._is_hopeless(candidate):
            self._hopeless.append((number, candidate))
        else:
            self._rank(number, candidate)

    def shortlist(self, fit: Fit) -> list[Estimate]:
        """Returns the fastest on paper."""
        if not self._fastest:
            for number, candidate in self._hopeless:
                self._rank(number, candidate)
        while True:
            best, tried = self._run(fit)
            if tried <= self._sure or not self._slow:
                return best
            # So many do not fit on paper that others may come next.
            self._sure = TRIED if self._sure < TRIED else math.inf
            slow, self._slow = self._slow, []
            for number, candidate in slow:
                self.add(number, candidate)

    def _run(self, fit: Fit) -> tuple[list[Estimate], int]:
        """Returns those that fit, and how many were tried for that."""
        best: list[Estimate] = []
        fitting = sorted(row for row in self.rows if row[1] <= self.limit)
        for tried, (*_, candidate) in enumerate(fitting):
            if len(best) == SHORTLIST or (best and tried >= TRIED):
                return best, tried
            best += filter(None, [fit(candidate)])
        return best, len(fitting)

    def _rank(self, number: int, candidate: Candidate) -> None:
        priced = rough(candidate, self.space, self.prices, self.timed, self.limit)
        if priced is None:
            return
        seconds, peak, complete = priced
        self.rows.append((seconds, peak, number, complete))
        if candidate.recompute == "none" and peak <= ROOMY * self.limit:
            self._roomy.add(_but_recompute(candidate))
        if peak <= self.limit:
            insort(self._fastest, seconds)
            del self._fastest[TRIED:]

    def _is_slow(self, candidate: Candidate) -> bool:
        c = candidate
        if len(self._fastest) < self._sure:
            return False
        way = way_of(candidate)
        if self._is_priced(way):
            return False
        slowest, of = self._fastest[int(self._sure) - 1], way._replace(halves=False)
        for policy in dict.fromkeys(("none", c.recompute)):
            for costs, parts in self._known(of._replace(recompute=policy)):
                of_whole, limit = (c, self.space.runs, costs), slowest * parts
                if (
                    least_computing(*of_whole) > limit
                    or least_seconds(*of_whole, self.timed) > limit
                ):
                    return True
        return False

    def _is_hopeless(self, candidate: Candidate) -> bool:
        """Whether a rank takes more memory than there is, by the least."""
        c, way = candidate, way_of(candidate)
        if not self._is_priced(way):
            one, less = _lighter(way)
            if any(
                self._overflows(c, of, costs, parts)
                for of in less
                for costs, parts in self._known(of)
            ):
                return True
            if c.samples > 1 and self._overflows(c, one, self._price(one)):
                return True
        return self._overflows(c, way, self._price(way))

    def _overflows(
        self, candidate: Candidate, of: Way, costs: LayerPrices, parts: int = 1
    ) -> bool:
        """Whether a rank takes more memory, by prices of a way that is no heavier."""
        runs = self.space.runs
        limit = self.limit * parts
        working, times = of.halves == candidate.halves, candidate.samples / of.samples
        if least_bytes(candidate, runs, costs, self.timed, working, times) <= limit:
            return False
        if least_states(candidate, runs, costs, self.timed) > limit:
            self._too_large.add((candidate.mesh, candidate.zero))
        return True

    def _price(self, way: Way) -> LayerPrices:
        if not self._is_priced(way):
            self._priced[_kind(way)][way.mesh] = None
            self._nearest.clear()
        return self.prices(way)

    def _is_priced(self, way: Way) -> bool:
        return way.mesh in self._priced[_kind(way)]

    def _known(self, way: Way) -> Iterator[tuple[LayerPrices, int]]:
        """Yields prices of layers, or else of the same split over the most of fewer
        ranks, if any are known; and into how many parts the way splits what one of
        these has."""
        kind, mesh = key = _kind(way), way.mesh
        if key not in self._nearest:
            known = [(parts_of(mesh, fewer), fewer) for fewer in self._priced[kind]]
            fitting = [(n, fewer) for n, fewer in known if n]
            self._nearest[key] = min(fitting, key=lambda pair: pair[0], default=None)
        if nearest := self._nearest[key]:
            parts, fewer = nearest
            yield self.prices(way._replace(mesh=fewer)), parts


@lru_cache(maxsize=4096)  # candidates in a row ask for the same
def _lighter(way: Way) -> tuple[Way, tuple[Way, ...]]:
    """Returns the way with one sample; and ways that take no more memory, so that it is
    not priced if one of these takes too much: with one sample, backwards whole or
    shares of weights. By what is known of fewer ranks, a rank has a part of it."""
    one = way._replace(samples=1)
    less = dict.fromkeys(
        of._replace(halves=halves, shares=shares)
        for of in (one, way)
        for halves in (way.halves, False)
        for shares in (way.shares, True)
    )
    return one, tuple(less)


def parts_of(mesh: Mesh, fewer: Mesh) -> int:
    """The number of parts into which a mesh splits the work of each rank of another
    one; 0 if it does not split it evenly, or by axes whose ranks have other samples."""
    ratios = {
        axis: divmod(mesh.axis_size(axis), fewer.axis_size(axis))
        for axis in {axis for axis, _ in (*mesh.axes, *fewer.axes)}
    }
    splits = {*TENSOR_AXES, *CONTEXT_AXES}
    if any(rest or (n > 1 and a not in splits) for a, (n, rest) in ratios.items()):
        return 0
    return prod(n for n, _ in ratios.values())


def _but_recompute(candidate: Candidate) -> tuple[object, ...]:
    """The key of a candidate's decisions, all but recomputation."""
    c = candidate
    return c.mesh, c.samples, c.schedule, c.stages_per_rank, c.zero


def _kind(way: Way) -> tuple[object, ...]:
    """The key of prices that each take long to find, on one mesh."""
    several = way.samples > 1
    return way.recompute, way.halves, several, way.shares, way.context_parallel


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
    """Orders candidates, the simplest first."""
    return (
        sum(n > 1 for _, n in candidate.mesh.axes),
        candidate.recompute not in ("none", "elementwise"),
        candidate.stages_per_rank,
        {USUAL_SCHEDULE: 0, AUTO: 2}.get(candidate.schedule, 1),
        candidate.zero,
        candidate.context_parallel != "gather",
        candidate.has_op_shardings,
    )


def run_on_paper(candidate: Candidate, prices: Prices, cluster: Cluster) -> Estimate:
    """Returns the estimate of a candidate, with its schedule simulated."""
    return estimate(accounts_of(candidate, prices), candidate, cluster)


def accounts_of(candidate: Candidate, prices: Prices) -> list[Account]:
    """Returns what one microbatch costs on each stage."""
    return prices_of(candidate, prices).stages(candidate.layers)
