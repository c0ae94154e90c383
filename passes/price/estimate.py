"""What a step of a candidate plan takes: seconds and bytes, and where they go.

Stage accounts and the cluster's links come in; the pipeline's schedule is run on paper.
Collectives are exposed: a rank waits for each of them, as the runtime does, except for
what ZeRO-3 gathers and ZeRO-2 and 3 scatter of parameters: that moves while another
block computes, and slows it a little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from passes.mesh import Mesh
from passes.price.candidate import Candidate
from passes.price.cluster import Cluster, Link
from passes.price.estimate_memory import rank_memory
from passes.price.price import (
    BACKWARD,
    FORWARD,
    STEP,
    UPDATE,
    WEIGHT,
    Account,
    footprint_of,
)
from passes.price.sources import Sources, find_sources
from passes.schedule.crowd import Crowd, simulate_crowd
from passes.schedule.footprint import Footprint, peak_bytes
from passes.schedule.make_schedule import make_schedule
from passes.schedule.schedule import Schedule, add_communication
from passes.schedule.simulate_schedule import Timeline
from passes.stage.overlap import BUCKET

# AdamW reads a parameter, its gradient and two moments, and writes three of them.
OPTIMIZER_TRAFFIC = 7
# What a collective beside computing takes from it, of its own seconds: an assumption,
# that kernels which communicate hold an eighth of a GPU's multiprocessors. That they
# slow what runs beside them is measured in Rashidi 2021, arXiv:2007.00156.
BESIDE = 0.125
# What a rank does once a step before the first microbatch; the rest is after the last.
BEFORE = ("parameters", "all_gather")
NOTHING = Footprint(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class StageSeconds:
    """Of one microbatch on one stage: forward, and the halves of the backward, with
    what it waits for others in them; waits: (part, collective, axes) -> seconds."""

    forward: float
    backward: float
    weight: float
    send: float
    waits: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    footprint: Footprint = NOTHING


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


def stage_seconds(
    account: Account, candidate: Candidate, cluster: Cluster
) -> StageSeconds:
    """Seconds of one microbatch of a stage, whose process has a core to itself.

    A link's seconds are with all ranks at it. Where they share cores, and so have less
    than one each, alone it takes so much less.
    """
    share = min(1.0, cluster.cores_each)
    waits: dict[tuple[str, ...], float] = {}
    took = {}
    for part in (FORWARD, BACKWARD, WEIGHT):
        took[part] = account["seconds", part]
        for kind, axes, calls, amount in account.exchanges(part):
            if calls > 0:
                link = cluster.link(candidate.mesh, axes)
                key = (part, kind, *axes)
                waits[key] = share * calls * link.seconds(kind, amount / calls)
        computing = took[part]
        took[part] += sum(s for key, s in waits.items() if key[0] == part)
        took[part] = max(took[part], _dispatching(account, part, cluster))
        moving = share * gather_seconds(account, candidate, cluster, part)
        # They move while another block computes; nothing else does for one of them.
        exposed = max(moving - computing, moving / candidate.blocks)
        # Copies that a core has to make need one beside that which computes.
        both = (computing + moving) / max(1.0, cluster.cores_each)
        exposed = max(exposed, both - computing)
        if moving > 0:
            waited = exposed + BESIDE * (moving - exposed)
            kind = "all_gather" if candidate.shares == 3 else "reduce_scatter"
            over = tuple(axis for axis, _ in _shared(account, candidate))
            key = (part, kind, *over)
            waits[key] = waited
            took[part] += waited
    send = share * neighbour(cluster, candidate.mesh).seconds(
        "send", account["message", "sent"]
    )
    return StageSeconds(
        took[FORWARD],
        took[BACKWARD],
        took[WEIGHT],
        send,
        waits,
        footprint_of(account, candidate.shares, candidate.data_parallel > 1),
    )


def _dispatching(account: Account, part: str, cluster: Cluster) -> float:
    """Seconds until the host has started all ops of a part."""
    calls = sum(calls for _, _, calls, _ in account.exchanges(part))
    return cluster.device.dispatch * (account["launches", part] + calls)


def gather_seconds(
    account: Account, candidate: Candidate, cluster: Cluster, part: str
) -> float:
    """What moves by blocks, beside computing: under ZeRO-3 parameters come in the
    forward and again in the backward; with ZeRO-2 as well, gradients go in it."""
    if candidate.shares < 2 or part == WEIGHT:
        return 0.0
    count, gather, scatter = candidate.blocks, 0.0, 0.0
    for axis, share in _shared(account, candidate):
        link = cluster.link(candidate.mesh, (axis,))
        if candidate.shares == 3:
            gather += count * link.seconds("all_gather", share["read"] / count)
        if part == BACKWARD:
            scatter += count * link.seconds("reduce_scatter", share["trained"] / count)
    return gather + scatter


def in_buckets(link: Link, kind: str, whole: float) -> float:
    """Seconds of what moves once a step, see `passes.stage.overlap`."""
    count = max(1, math.ceil(whole / BUCKET))
    return count * link.seconds(kind, whole / count)


def _shared(
    account: Account, candidate: Candidate
) -> list[tuple[str, dict[str, float]]]:
    """What ZeRO gathers and scatters, axis -> bytes of what is "read" and "trained",
    whole on that axis: ep lies inside of dp, and shares no experts."""
    whole = {term: account["memory", term] for term in ("read", "trained")}
    alike = {t: n - account["experts", t] for t, n in whole.items()}
    dp = candidate.mesh.axis_size("dp")
    found = [("dp", whole), ("ep", {t: n / dp for t, n in alike.items()})]
    return [(axis, n) for axis, n in found if candidate.mesh.axis_size(axis) > 1]


def neighbour(cluster: Cluster, mesh: Mesh) -> Link:
    """The link from a pipeline rank to the next."""
    return cluster.link(mesh, ("pp",))


def step_parts(
    account: Account, candidate: Candidate, cluster: Cluster
) -> dict[str, float]:
    """What a rank does once a step, beside microbatches: term -> seconds."""
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
    trained, experts = account["memory", "trained"], account["experts", "trained"]
    share = trained
    if not candidate.zero and candidate.mesh.axis_size("dp") > 1:
        link = cluster.link(candidate.mesh, ("dp",))
        found["gradients dp"] = link.seconds("all_reduce", trained)
    if candidate.zero:
        share = (trained - experts) / candidate.alike
        share += experts / candidate.data_parallel
    for axis, own in _shared(account, candidate) if candidate.zero in (1, 2) else ():
        link = cluster.link(candidate.mesh, (axis,))
        if candidate.zero == 1:
            gradients = in_buckets(link, "reduce_scatter", own["trained"])
            found[f"gradients {axis}"] = gradients
        found[f"parameters {axis}"] = in_buckets(link, "all_gather", own["read"])
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
    """Run the candidate on paper. accounts: of each stage."""
    took = [stage_seconds(a, candidate, cluster) for a in accounts]
    timeline = _timeline(took, candidate, cluster.crowd(candidate.mesh))
    return _sum_up(accounts, took, timeline, candidate, cluster)


def step_seconds(
    accounts: Sequence[Account], candidate: Candidate, cluster: Cluster
) -> float:
    """The seconds of `estimate`, without what it finds out beside."""
    took = [stage_seconds(a, candidate, cluster) for a in accounts]
    timeline = _timeline(took, candidate, cluster.crowd(candidate.mesh))
    once = [0.0] * candidate.mesh.axis_size("pp")
    for account, rank in zip(accounts, timeline.schedule.stage_to_rank, strict=True):
        once[rank] += sum(step_parts(account, candidate, cluster).values())
    return timeline.total + max(once)


# Candidates that differ in what they shard or recompute share a schedule.
@lru_cache(maxsize=4)
def _schedule(
    name: str, ranks: int, microbatches: int, stages_per_rank: int
) -> Schedule:
    return add_communication(make_schedule(name, ranks, microbatches, stages_per_rank))


def _timeline(
    took: Sequence[StageSeconds], candidate: Candidate, crowd: Crowd
) -> Timeline:
    ranks = candidate.mesh.axis_size("pp")
    return simulate_crowd(
        _schedule(
            candidate.schedule, ranks, candidate.microbatches, candidate.stages_per_rank
        ),
        [t.forward for t in took],
        [t.backward + t.weight for t in took],
        [t.weight for t in took],
        max((t.send for t in took[:-1]), default=0.0),
        crowd,
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
    for rank in range(len(schedule.ranks)):
        own = [
            a
            for a, r in zip(accounts, schedule.stage_to_rank, strict=True)
            if r == rank
        ]
        most = peak_bytes(schedule, rank, footprints)
        memory.append(rank_memory(own, candidate, most))
        once: dict[str, float] = {}
        for account in own:
            for term, seconds in step_parts(account, candidate, cluster).items():
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
            t, waits = took[stage], sum(took[stage].waits.values())
            for key, waited in t.waits.items():
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
