"""What one microbatch takes on a stage of a candidate, with what it waits for.

Collectives are exposed: a rank waits for each of them, as the runtime does, except for
what ZeRO-3 gathers and ZeRO-2 and 3 scatter of parameters, and for parameters that come
and gradients that leave once a step: that moves while another block computes, and slows
it a little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..mesh import Mesh
from ..price.candidate import Candidate
from ..price.cluster import Cluster, Link
from ..price.price import BACKWARD, FORWARD, WEIGHT, Account, footprint_of
from ..schedule.footprint import Footprint

# What a collective beside computing takes from it, of its own seconds: an assumption,
# that kernels which communicate hold an eighth of a GPU's multiprocessors. That they
# slow what runs beside them is measured in Rashidi 2021, arXiv:2007.00156.
BESIDE = 0.125
NOTHING = Footprint(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class StageSeconds:
    """What one microbatch takes on a stage: forward, and halves of the backward, with
    what it waits for others in them; exposed: (part, collective, axes) -> seconds."""

    forward: float
    backward: float
    weight: float
    send: float
    exposed: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    footprint: Footprint = NOTHING


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
        if moving > 0:
            waited = exposed(moving, computing, candidate.blocks, cluster)
            kind = "all_gather" if candidate.shares == 3 else "reduce_scatter"
            over = tuple(axis for axis, _ in shared(account, candidate))
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


def exposed(moving: float, computing: float, blocks: int, cluster: Cluster) -> float:
    """Seconds that collectives add to computing, which move by block beside it.

    moving, computing: seconds of each by itself.
    """
    # They move while another block computes; nothing else does for one of them.
    found = max(moving - computing, moving / blocks)
    # Copies that a core has to make need one beside that which computes.
    both = (computing + moving) / max(1.0, cluster.cores_each)
    found = max(found, both - computing)
    return found + BESIDE * (moving - found)


def last_backward(took: StageSeconds, halves: bool) -> float:
    """Seconds in which gradients become ready. halves: whether backwards are split."""
    return took.weight if halves else took.backward + took.weight


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
    for axis, share in shared(account, candidate):
        link = cluster.link(candidate.mesh, (axis,))
        if candidate.shares == 3:
            gather += count * link.seconds("all_gather", share["read"] / count)
        if part == BACKWARD:
            scatter += count * link.seconds("reduce_scatter", share["trained"] / count)
    return gather + scatter


def shared(
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
