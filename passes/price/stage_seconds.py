"""Seconds of one microbatch on a stage of a candidate, with its waits.

Collectives are exposed: a rank waits for each of them, as the runtime does, except for
what ZeRO-3 gathers and ZeRO-2 and 3 scatter of parameters, and for parameters that come
and gradients that leave once a step: that moves while another block computes, and slows
it a little. Where ranks meet they wait for the last of them, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..cost import Exchanges, Seconds
from ..mesh import PIPELINE, Mesh
from ..price.account import Account, PartCost
from ..price.cluster import Cluster, Link
from ..schedule.footprint import BACKWARD, FORWARD, NO_BYTES, WEIGHT, Footprint

# What a collective beside computing takes from it, of its own seconds: an assumption,
# that kernels which communicate hold an eighth of a GPU's multiprocessors. That they
# slow what runs beside them is measured in Rashidi 2021, arXiv:2007.00156.
SLOWED = 0.125
SKEW = "skew"  # what ranks wait for the last of them


@dataclass(frozen=True)
class Exposed:
    """Seconds that a part of a microbatch waits for a collective over some axes. calls,
    bytes: of what moves, see `passes.price.cluster.Link`."""

    part: str
    kind: str
    axes: tuple[str, ...]
    seconds: float
    calls: float
    bytes: float

    @property
    def label(self) -> str:
        """`all_gather tp`."""
        return f"{self.kind} {','.join(self.axes)}"


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch on a stage: forward and the halves of backward, with
    their waits. footprint: its memory."""

    forward: float
    backward: float
    weight: float
    send: float
    exposed: tuple[Exposed, ...] = ()
    footprint: Footprint = NO_BYTES

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight

    @property
    def halves(self) -> Seconds:
        """Returns the parts for a schedule."""
        return Seconds(self.forward, self.backward, self.weight)

    @property
    def exposed_total(self) -> float:
        return sum(w.seconds for w in self.exposed)

    @property
    def computing(self) -> Mapping[str, float]:
        """Seconds of each part without those that it waits."""
        whole = {FORWARD: self.forward, BACKWARD: self.backward, WEIGHT: self.weight}
        waited = dict.fromkeys(whole, 0.0)
        for wait in self.exposed:
            waited[wait.part] += wait.seconds
        return {part: s - waited[part] for part, s in whole.items()}


def stage_seconds(account: Account, mesh: Mesh, cluster: Cluster) -> StageSeconds:
    """Seconds of one microbatch of a stage, whose process has a core to itself.

    account: of a rank of the whole mesh, with what moves of parameters.
    """
    took: dict[str, float] = {}
    exposed: list[Exposed] = []
    for name, part in account.microbatch.items():
        took[name], own = part_seconds(part, name, mesh, cluster)
        exposed += own
    share = min(1.0, cluster.cores_each)
    parts = took[FORWARD], took[BACKWARD], took[WEIGHT]
    next_rank = neighbour(cluster, mesh)
    send = share * next_rank.seconds("send", account.sent)
    if shares_cores(cluster):  # who waits for a message has to be given one
        send = max(send, cluster.messages.wakeup)
    else:  # a message follows a forward, and one a backward
        send += next_rank.skew(sum(parts) / 2)
    return StageSeconds(*parts, send, tuple(exposed), account.footprint)


def part_seconds(
    part: PartCost, name: str, mesh: Mesh, cluster: Cluster
) -> tuple[float, list[Exposed]]:
    """Seconds of a part of one microbatch, and those of them that are waits, by name.

    A link's seconds are with all ranks at it. Where ranks share cores, and so have less
    than one each, a rank alone takes so much less.
    """
    share = min(1.0, cluster.cores_each)

    def moved(exchanges: Exchanges) -> list[Exposed]:
        each = []
        for e in exchanges:
            if e.calls > 0:
                once = cluster.link(mesh, e.axes).seconds(e.kind, e.bytes / e.calls)
                took = share * e.calls * once
                each.append(Exposed(name, e.kind, e.axes, took, e.calls, e.bytes))
        return each

    exposed = [*moved(part.exchanges), *_skew(part, name, mesh, cluster)]
    starts = part.launches + sum(w.calls for w in exposed)
    took = part.seconds + sum(w.seconds for w in exposed)
    took = max(took, cluster.device.dispatch * starts)
    beside = moved(part.beside)
    if (moving := sum(w.seconds for w in beside)) > 0:
        blocks = max(w.calls for w in beside)
        waited = exposed_seconds(moving, part.seconds, blocks, cluster)
        took += waited
        slower = waited / moving
        exposed += [replace(w, seconds=slower * w.seconds) for w in beside]
    return took, exposed


def _skew(part: PartCost, name: str, mesh: Mesh, cluster: Cluster) -> Iterator[Exposed]:
    """Yields the seconds that ranks wait for the slowest in a part of one microbatch,
    along the axes where they wait longest."""
    if shares_cores(cluster):
        return
    meetings = defaultdict[tuple[str, ...], float](float)
    for e in (*part.exchanges, *part.beside):
        meetings[e.axes] += e.calls
    late = {
        axes: cluster.link(mesh, axes).skew(part.seconds, calls)
        for axes, calls in meetings.items()
        if calls > 0
    }
    if any(late.values()):
        axes = max(late, key=late.__getitem__)
        yield Exposed(name, SKEW, axes, late[axes], 0.0, 0.0)


def shares_cores(cluster: Cluster) -> bool:
    """Whether processes have less than a core each: while ranks wait for the last of
    them, others compute."""
    return cluster.cores_each < 1


def exposed_seconds(
    moving: float, computing: float, blocks: float, cluster: Cluster
) -> float:
    """The seconds that blockwise collectives add to the computing they run beside.

    moving, computing: seconds of each by itself.
    """
    # They move while another block computes; nothing else does for one of them.
    waited = max(moving - computing, moving / blocks)
    # Copies that a core has to make need one beside that which computes.
    both = (computing + moving) / max(1.0, cluster.cores_each)
    waited = max(waited, both - computing)
    return waited + SLOWED * (moving - waited)


def neighbour(cluster: Cluster, mesh: Mesh) -> Link:
    """The link from a pipeline rank to the next."""
    link = cluster.link(mesh, (PIPELINE,))
    return replace(link, ranks=min(2, link.ranks), near=None)
