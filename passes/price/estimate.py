"""What a step of a candidate plan takes: seconds and bytes, and where they go.

Stage accounts and the cluster's links come in; the pipeline's schedule is run on paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ..plan import AUTO
from ..price.candidate import Candidate
from ..price.cluster import Cluster, Link
from ..price.estimate_memory import rank_memory
from ..price.made_order import make_order
from ..price.price import FORWARD, STEP, TIED, UPDATE, Account, once_a_rank
from ..price.sources import Sources, find_sources
from ..price.stage_seconds import (
    StageSeconds,
    exposed,
    last_backward,
    neighbour,
    shared,
    stage_seconds,
)
from ..schedule.check_schedule import run_order
from ..schedule.core_contention import CoreContention, simulate_contention
from ..schedule.footprint import peak_bytes
from ..schedule.make_schedule import make_schedule
from ..schedule.order import read_order
from ..schedule.schedule import Schedule, add_communication
from ..schedule.simulate_schedule import Timeline

# AdamW reads a parameter, its gradient and two moments, and writes three of them.
OPTIMIZER_TRAFFIC = 7
# What a rank does once a step before the first microbatch; the rest is after the last.
BEFORE = ("parameters", "all_gather")


@dataclass(frozen=True)
class Estimate:
    """seconds: of a step. memory: of each pipeline rank, term -> bytes. parts: where
    the slowest rank's seconds go, all of them. bubble: the idle share of all ranks'
    time. stages: one microbatch on each. once: what each pipeline rank does once a
    step, term -> seconds. sources: how the seconds were found, see
    `passes.price.sources`."""

    candidate: Candidate
    seconds: float
    memory: tuple[Mapping[str, float], ...]
    parts: Mapping[str, float]
    bubble: float
    flops: float
    stages: tuple[StageSeconds, ...] = ()
    once: tuple[Mapping[str, float], ...] = ()
    sources: Sources = field(default_factory=dict)

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


def in_blocks(link: Link, kind: str, whole: float, blocks: int) -> float:
    """Seconds of what moves once a step, see `passes.stage.overlap`."""
    return blocks * link.seconds(kind, whole / blocks)


def moves_beside(term: str) -> str:
    """What moves while a microbatch computes: "gradients" beside the last backward, but
    for a weight of several stages; "parameters" beside the first forward."""
    what, _, axes = term.partition(" ")
    return what if what in ("gradients", "parameters") and axes != "pp" else ""


def step_parts(
    account: Account,
    candidate: Candidate,
    cluster: Cluster,
    took: StageSeconds | None = None,
) -> dict[str, float]:
    """What a rank does once a step, beside microbatches: term -> seconds.

    took: of a microbatch, beside the first of which parameters come, and beside the
    last gradients leave; None: before and after.
    """
    crowded = 1 / min(1.0, cluster.cores_each)  # all ranks are busy
    found = {"once a step": crowded * account["seconds", STEP]}
    for kind, axes, _, amount in account.exchanges(STEP):
        link = cluster.link(candidate.mesh, axes)
        found[f"{kind} {','.join(axes)}"] = link.seconds(kind, amount)
    for key, amount in account.amounts.items():
        # What ep shares out is scattered, see below.
        axes = tuple(a for a in key[1:] if not (candidate.zero and a == "ep"))
        if key[0] == "pending" and axes:
            link = cluster.link(candidate.mesh, axes)
            term = f"gradients {','.join(axes)}"
            seconds = link.seconds("all_reduce", amount)
            found[term] = found.get(term, 0.0) + seconds
    if tied := account[TIED, "trained"]:
        ends = replace(neighbour(cluster, candidate.mesh), ranks=2, near=None)
        tied /= candidate.alike if candidate.zero else 1
        found["gradients pp"] = ends.seconds("all_reduce", tied)
    trained, experts = account["memory", "trained"], account["experts", "trained"]
    share = trained
    if not candidate.zero and candidate.mesh.axis_size("dp") > 1:
        link = cluster.link(candidate.mesh, ("dp",))
        found["gradients dp"] = link.seconds("all_reduce", trained)
    if candidate.zero:
        share = (trained - experts) / candidate.alike
        share += experts / candidate.data_parallel
    for axis, own in shared(account, candidate) if candidate.zero in (1, 2) else ():
        link = cluster.link(candidate.mesh, (axis,))
        if candidate.zero == 1:
            gradients = in_blocks(
                link, "reduce_scatter", own["trained"], candidate.blocks
            )
            found[f"gradients {axis}"] = gradients
        read = own["read"]
        parameters = in_blocks(link, "all_gather", read, candidate.blocks)
        found[f"parameters {axis}"] = parameters
    if took is not None:
        backward = last_backward(took, candidate.halves)
        for what, beside in (("gradients", backward), ("parameters", took.forward)):
            own = {t: s for t, s in found.items() if moves_beside(t) == what}
            if moving := sum(own.values()):
                waited = exposed(moving, beside, candidate.blocks, cluster)
                found |= {term: s * waited / moving for term, s in own.items()}
    device = cluster.device
    if device.ops.update and trained:
        update = account["seconds", UPDATE] * share / trained
    else:
        speed = device.bytes_per_second * device.bandwidth_efficiency
        update = OPTIMIZER_TRAFFIC * share / speed
    found["optimizer"] = crowded * update
    return found


def estimate(
    accounts: Sequence[Account], candidate: Candidate, cluster: Cluster
) -> Estimate:
    """Run the candidate on paper. accounts: of each stage, of schedule "auto" with
    backwards in halves. A candidate of that schedule gets an order, if it has none.

    Raises ScheduleError: no order fits into the memory of a device.
    """
    took = [stage_seconds(a, candidate, cluster) for a in accounts]
    if candidate.schedule == AUTO and not candidate.order:
        candidate = make_order(accounts, took, candidate, cluster.device.memory)
    timeline = _timeline(took, candidate, cluster.contention(candidate.mesh))
    return _sum_up(accounts, took, timeline, candidate, cluster)


def step_seconds(
    accounts: Sequence[Account], candidate: Candidate, cluster: Cluster
) -> float:
    """The seconds of `estimate`, without what it finds out beside, and where nothing
    moves beside the first and the last microbatch, as in others' code."""
    took = [stage_seconds(a, candidate, cluster) for a in accounts]
    timeline = _timeline(took, candidate, cluster.contention(candidate.mesh))
    ranks = once_a_rank(accounts, timeline.schedule.stage_to_rank)
    once = (
        sum(sum(step_parts(a, candidate, cluster).values()) for a in own)
        for own in ranks
    )
    return timeline.total + max(once)


def schedule_of(candidate: Candidate) -> Schedule:
    """With its messages."""
    ranks, v = candidate.mesh.axis_size("pp"), candidate.stages_per_rank
    if candidate.schedule == AUTO:
        return _ordered(candidate.order, ranks, candidate.microbatches, v)
    return _named(candidate.schedule, ranks, candidate.microbatches, v)


# Candidates that differ in what they shard or recompute share a schedule.
@lru_cache(maxsize=4)
def _named(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    return add_communication(make_schedule(name, ranks, microbatches, stages_per_rank))


_ordered = lru_cache(maxsize=4)(read_order)


def _timeline(
    took: Sequence[StageSeconds], candidate: Candidate, contention: CoreContention
) -> Timeline:
    schedule = schedule_of(candidate)
    return simulate_contention(
        schedule,
        [t.forward for t in took],
        [t.backward + t.weight for t in took],
        [t.weight for t in took],
        max((t.send for t in took[:-1]), default=0.0),
        contention,
        run_order(schedule),
    )


def _sum_up(
    accounts: Sequence[Account],
    took: Sequence[StageSeconds],
    timeline: Timeline,
    candidate: Candidate,
    cluster: Cluster,
) -> Estimate:
    schedule, m = timeline.schedule, candidate.microbatches
    memory, steps = [], []
    footprints = [t.footprint for t in took]
    for rank, own in enumerate(once_a_rank(accounts, schedule.stage_to_rank)):
        most = peak_bytes(schedule, rank, footprints)
        memory.append(rank_memory(own, candidate, most))
        once: dict[str, float] = {}
        stages = [
            t for t, r in zip(took, schedule.stage_to_rank, strict=True) if r == rank
        ]
        for account, t in zip(own, stages, strict=True):
            for term, seconds in step_parts(account, candidate, cluster, t).items():
                once[term] = once.get(term, 0.0) + seconds
        steps.append(once)
    slowest = max(
        range(len(steps)), key=lambda r: timeline.busy[r] + sum(steps[r].values())
    )
    before, after = _ends(steps)
    seconds = timeline.total + max(before) + max(after)
    # Ranks with less to do once a step wait for the others.
    rest = seconds - timeline.busy[slowest] - before[slowest] - after[slowest]
    parts = {"idle": rest}
    for stage, rank in enumerate(schedule.stage_to_rank):
        if rank == slowest:
            t, waits = took[stage], sum(took[stage].exposed.values())
            for key, waited in t.exposed.items():
                term = f"{key[1]} {','.join(key[2:])}"
                parts[term] = parts.get(term, 0.0) + m * waited
            computing = t.forward + t.backward + t.weight - waits
            parts["compute"] = parts.get("compute", 0.0) + m * computing
    if cluster.cores:
        nominal = sum(parts.values()) - rest
        parts["shared cores"] = timeline.busy[slowest] - nominal
    for term, waited in steps[slowest].items():
        parts[term] = parts.get(term, 0.0) + waited
    flops = sum(a["flops", FORWARD] for a in accounts) * 3 * m
    return Estimate(
        candidate,
        seconds,
        tuple(memory),
        parts,
        timeline.bubble,
        flops * candidate.mesh.size / candidate.mesh.axis_size("pp"),
        tuple(took),
        tuple(steps),
        find_sources(accounts, candidate.mesh, m, cluster),
    )


def _ends(steps: Sequence[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    """Seconds of each rank before the first microbatch, and after the last."""
    before = [sum(s for t, s in x.items() if t.startswith(BEFORE)) for x in steps]
    whole = [sum(x.values()) for x in steps]
    return before, [w - b for w, b in zip(whole, before, strict=True)]
