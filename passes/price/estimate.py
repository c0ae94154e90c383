"""Estimates a step of a candidate plan: seconds and bytes, and where they go.

Stage accounts and the cluster's links come in; the pipeline's schedule is run on paper.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ..mesh import PIPELINE, Mesh
from ..plan import AUTO
from ..price.account import Account, memory_of, once_a_rank
from ..price.candidate import Candidate
from ..price.cluster import Cluster, Device
from ..price.made_order import make_order
from ..price.share import share
from ..price.sources import Sources, find_sources
from ..price.stage_seconds import (
    SKEW,
    StageSeconds,
    exposed_seconds,
    neighbour,
    shares_cores,
    stage_seconds,
)
from ..schedule.core_contention import ALONE, CoreContention, simulate_contention
from ..schedule.make_schedule import make_schedule
from ..schedule.order import expand_order
from ..schedule.schedule import KINDS, Schedule, add_communication
from ..schedule.simulate_schedule import Timeline

# AdamW reads a parameter, its gradient and two moments, and writes three of them.
OPTIMIZER_TRAFFIC = 7
# What a rank does once a step before the first microbatch; the rest is after the last.
BEFORE = ("parameters", "all_gather")
BY_BLOCK = {"all_gather": "parameters", "reduce_scatter": "gradients"}


@dataclass(frozen=True)
class Estimate:
    """seconds: of a step. memory: of each pipeline rank, term -> bytes. parts: where
    the slowest rank's seconds go, all of them. bubble: the idle share of all ranks'
    time. stages: one microbatch on each. once: what each pipeline rank does once a
    step, term -> seconds. sources: how the seconds were found, see
    `passes.price.sources`. whole_layers: the step's seconds if full recomputation ran
    whole layers again, see `passes.search.recompute_whole`; None: not asked."""

    candidate: Candidate
    seconds: float
    memory: tuple[Mapping[str, float], ...]
    parts: Mapping[str, float]
    bubble: float
    flops: float
    stages: tuple[StageSeconds, ...] = ()
    once: tuple[Mapping[str, float], ...] = ()
    sources: Sources = field(default_factory=dict)
    whole_layers: float | None = None

    @property
    def peak(self) -> float:
        """Bytes on the rank that needs most."""
        return max(sum(terms.values()) for terms in self.memory)

    @property
    def communication(self) -> float:
        """Seconds that the slowest rank waits for messages of others."""
        own = ("compute", "idle", "shared cores", "optimizer", "once a step")
        return sum(s for term, s in self.parts.items() if term not in own)

    def utilisation(self, cluster: Cluster) -> float:
        """MFU: the model's own operations over the peak (Chowdhery 2022, appendix B).
        The peak is the fastest type's that the device has."""
        peak = max(cluster.device.flops.values()) * cluster.devices
        return self.flops / (self.seconds * peak)


def moves_beside(term: str) -> str:
    """What moves while a microbatch computes: "gradients" beside the last backward, but
    for a weight of several stages; "parameters" beside the first forward."""
    kind, _, axes = term.partition(" ")
    return kind if kind in ("gradients", "parameters") and axes != PIPELINE else ""


def step_parts(
    account: Account,
    mesh: Mesh,
    cluster: Cluster,
    took: StageSeconds | None = None,
    halves: bool = False,
) -> dict[str, float]:
    """What a rank does once a step, beside microbatches: term -> seconds.

    account: of a rank of the whole mesh. took: of a microbatch, beside the first of
    which parameters come, and beside the last gradients leave, in its weight half if
    backwards have `halves`; None: before and after.
    """
    crowded = 1 / min(1.0, cluster.cores_each)  # all ranks are busy
    terms = defaultdict[str, float](float)
    step = account.step
    terms["once a step"] = crowded * step.seconds
    blocks = account.forward.gathered.calls
    for names, exchanges in (({}, step.exchanges), (BY_BLOCK, step.beside)):
        for e in exchanges:
            link = cluster.link(mesh, e.axes)
            term = f"{names.get(e.kind, e.kind)} {','.join(e.axes)}"
            terms[term] += e.calls * link.seconds(e.kind, e.bytes / e.calls)
            blocks = max(blocks, e.calls)
    for e in account.pending:
        if e.axes and e.bytes:
            link = cluster.link(mesh, e.axes)
            terms[f"gradients {','.join(e.axes)}"] += link.seconds(e.kind, e.bytes)
    if tied := account.tied.trained:
        terms["gradients pp"] += neighbour(cluster, mesh).seconds("all_reduce", tied)
    if took is not None:
        backward = took.weight if halves else took.backward + took.weight
        for term, spent in (("gradients", backward), ("parameters", took.forward)):
            own = {t: s for t, s in terms.items() if moves_beside(t) == term}
            if moving := sum(own.values()):
                waited = exposed_seconds(moving, spent, max(1.0, blocks), cluster)
                terms.update({t: s * waited / moving for t, s in own.items()})
        meet = {e.axes for e in (*step.beside, *account.pending) if e.bytes}
        if shares_cores(cluster):
            meet = set()
        for axes in sorted(meet - {e.axes for e in account.backward.exchanges}):
            if late := cluster.link(mesh, axes).skew(backward):
                terms[f"{SKEW} {','.join(axes)}"] = late
    terms["optimizer"] = crowded * update_seconds(account, cluster.device)
    return dict(terms)


def join_stages(
    parts: Sequence[Mapping[str, float]], gaps: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """What a rank does once a step for all of its stages, term -> seconds.

    parts: of each stage by itself, see `step_parts`. gaps: of "gradients" and
    "parameters", see `moves_beside`, seconds from each stage's own microbatch beside
    which they move to that of the next stage: so long they may go on moving.
    """
    terms = defaultdict[str, float](float)
    for of_stage in parts:
        for term, seconds in of_stage.items():
            terms[term] += seconds
    for kind, gaps_of in gaps.items():
        waited = 0.0
        # Of the stages a rank runs the last one's parameters come last, and its
        # gradients are ready first.
        for of_stage, gap in reversed(list(zip(parts, gaps_of, strict=True))):
            own = sum(s for t, s in of_stage.items() if moves_beside(t) == kind)
            waited = max(0.0, waited - gap) + own
        moving = {t: s for t, s in terms.items() if moves_beside(t) == kind}
        if whole := sum(moving.values()):
            terms.update({t: s * waited / whole for t, s in moving.items()})
    return dict(terms)


def _gaps(timeline: Timeline, rank: int) -> dict[str, list[float]]:
    """Seconds from each of a rank's stages to its next one, for `join_stages`."""
    schedule, firsts, lasts = timeline.schedule, [], []
    kinds, stages = schedule.numbers[rank]
    computes = np.isin(kinds, [n for kind, n in KINDS.items() if kind.is_compute])
    for stage in sorted({s for s, r in enumerate(schedule.stage_to_rank) if r == rank}):
        own = np.flatnonzero(computes & (stages == stage))
        firsts.append(own[0])
        lasts.append(own[-1])
    starts, ends = timeline.starts[rank], timeline.ends[rank]
    before = [starts[b] - ends[a] for a, b in pairwise(firsts)]
    after = [starts[a] - ends[b] for a, b in pairwise(lasts)]
    return {
        "parameters": [max(0.0, gap) for gap in (*before, 0.0)],
        "gradients": [max(0.0, gap) for gap in (*after, 0.0)],
    }


def update_seconds(account: Account, device: Device) -> float:
    """Seconds of the optimizer, as measured, else by its memory traffic."""
    if device.ops.update:
        return account.update
    return device.seconds(moved=OPTIMIZER_TRAFFIC * account.held.trained)


def estimate(
    accounts: Sequence[Account], candidate: Candidate, cluster: Cluster
) -> Estimate:
    """The same, whatever memory it takes."""
    estimated = estimate_within(math.inf, accounts, candidate, cluster)
    assert estimated is not None, "all fits"
    return estimated


def estimate_within(
    limit: float, accounts: Sequence[Account], candidate: Candidate, cluster: Cluster
) -> Estimate | None:
    """Run the candidate on paper; None: a rank takes more than `limit` bytes. accounts:
    of each stage, without data parallel ranks; of schedule "auto" with backwards in
    halves. A candidate of that schedule gets an order, if it has none.

    Raises ScheduleError: no order fits into the memory of a device.
    """
    shared = [share(a, candidate, cluster.device) for a in accounts]
    took = [stage_seconds(a, candidate.mesh, cluster) for a in shared]
    if candidate.schedule == AUTO and not candidate.order:
        candidate = make_order(shared, took, candidate, cluster.device.memory)
    ranks = once_a_rank(shared, candidate.placement)
    footprints = [t.footprint for t in took]
    memory = memory_of(ranks, footprints, schedule_of(candidate))
    if max(sum(terms.values()) for terms in memory) > limit:
        return None
    return run_accounts(shared, ranks, took, memory, candidate, cluster)


def step_seconds(
    accounts: Sequence[Account], candidate: Candidate, cluster: Cluster
) -> float:
    """The seconds of `estimate`, without what it finds out beside, and where nothing
    moves beside the first and the last microbatch, as in others' code."""
    shared = [share(a, candidate, cluster.device) for a in accounts]
    took = [stage_seconds(a, candidate.mesh, cluster) for a in shared]
    timeline = _timeline(took, candidate, cluster.contention(candidate.mesh))
    once = (
        sum(sum(step_parts(a, candidate.mesh, cluster).values()) for a in own)
        for own in once_a_rank(shared, timeline.schedule.stage_to_rank)
    )
    return timeline.total + max(once)


def schedule_of(candidate: Candidate) -> Schedule:
    """The schedule of a candidate, with its messages."""
    ranks, v = candidate.mesh.pipeline_ranks, candidate.stages_per_rank
    if candidate.schedule == AUTO:
        return _ordered(candidate.order, candidate.microbatches)
    return _named(candidate.schedule, ranks, candidate.microbatches, v)


# Candidates that differ in what they shard or recompute share a schedule.
@lru_cache(maxsize=8)
def _named(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    return add_communication(make_schedule(name, ranks, microbatches, stages_per_rank))


_ordered = lru_cache(maxsize=4)(expand_order)


def _timeline(
    took: Sequence[StageSeconds], candidate: Candidate, contention: CoreContention
) -> Timeline:
    return run_schedule(schedule_of(candidate), took, contention)


def run_schedule(
    schedule: Schedule, took: Sequence[StageSeconds], contention: CoreContention = ALONE
) -> Timeline:
    """The microbatches of a step on paper. took: by one on each stage."""
    return simulate_contention(
        schedule,
        [t.halves for t in took],
        max((t.send for t in took[:-1]), default=0.0),
        contention,
        proved=True,
    )


def run_accounts(
    accounts: Sequence[Account],
    ranks: Sequence[Sequence[Account]],
    took: Sequence[StageSeconds],
    memory: Sequence[Mapping[str, float]],
    candidate: Candidate,
    cluster: Cluster,
) -> Estimate:
    """The estimate of a step. accounts, took: of each stage, of a rank of the whole
    mesh. ranks: the accounts of each pipeline rank, in which what several of its stages
    hold counts once. memory: of each, see `memory_of`."""
    timeline = _timeline(took, candidate, cluster.contention(candidate.mesh))
    schedule, m = timeline.schedule, candidate.microbatches
    steps = []
    for rank, own in enumerate(ranks):
        stages = [
            t for t, r in zip(took, schedule.stage_to_rank, strict=True) if r == rank
        ]
        parts = [
            step_parts(account, candidate.mesh, cluster, t, candidate.halves)
            for account, t in zip(own, stages, strict=True)
        ]
        steps.append(join_stages(parts, _gaps(timeline, rank)))
    before, after = _ends(steps)
    step = timeline.total + max(before) + max(after)
    slowest = max(
        range(len(steps)), key=lambda r: timeline.busy[r] + sum(steps[r].values())
    )
    flops = sum(a.forward.flops for a in accounts) * 3 * m
    return Estimate(
        candidate,
        step,
        tuple(memory),
        _parts_of(slowest, step, timeline, took, steps[slowest], m, cluster),
        timeline.bubble,
        flops * candidate.mesh.size / candidate.mesh.pipeline_ranks,
        tuple(took),
        tuple(steps),
        find_sources(accounts, candidate.mesh, m, cluster),
    )


def _parts_of(
    rank: int,
    step: float,
    timeline: Timeline,
    took: Sequence[StageSeconds],
    once: Mapping[str, float],
    microbatches: int,
    cluster: Cluster,
) -> dict[str, float]:
    """Splits the step's seconds on a pipeline rank by cause."""
    # Ranks with less to do once a step wait for the others.
    idle = step - timeline.busy[rank] - sum(once.values())
    parts = defaultdict[str, float](float, idle=idle)
    for t, r in zip(took, timeline.schedule.stage_to_rank, strict=True):
        if r == rank:
            for wait in t.exposed:
                parts[wait.label] += microbatches * wait.seconds
            parts["compute"] += microbatches * (t.total - t.exposed_total)
    if cluster.cores:
        parts["shared cores"] = timeline.busy[rank] - (sum(parts.values()) - idle)
    for term, waited in once.items():
        parts[term] += waited
    return dict(parts)


def _ends(steps: Sequence[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    """Seconds of each rank before the first microbatch, and after the last."""
    before = [sum(s for t, s in x.items() if t.startswith(BEFORE)) for x in steps]
    whole = [sum(x.values()) for x in steps]
    return before, [w - b for w, b in zip(whole, before, strict=True)]
