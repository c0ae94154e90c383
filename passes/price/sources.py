"""The sources of a plan's seconds: measurements, or a table of hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..mesh import PIPELINE, Mesh
from ..price.account import Account
from ..price.cluster import Cluster
from ..price.measured import SOURCES, TABLE

COMPUTE, MESSAGES = "compute", "messages"
Sources = Mapping[str, Mapping[str, float]]


def find_sources(
    accounts: Sequence[Account], mesh: Mesh, microbatches: int, cluster: Cluster
) -> Sources:
    """Splits a step's seconds: "compute" or "messages" -> how they were found, see
    `passes.price.measured` -> the share of all stages' sum. Nothing of what takes no
    time."""
    compute, messages = dict.fromkeys(SOURCES, 0.0), dict.fromkeys(SOURCES, 0.0)

    def talk(axes: tuple[str, ...], kind: str, bytes: float, calls: float) -> None:
        seconds, how = cluster.link(mesh, axes).find(kind, bytes)
        messages[how] += calls * seconds

    for account in accounts:
        for part in account.microbatch.values():
            known = {how: getattr(part, how) for how in SOURCES if how != TABLE}
            known[TABLE] = part.seconds - sum(known.values())
            for how, seconds in known.items():
                compute[how] += max(0.0, seconds)
            for e in part.exchanges:
                if e.calls > 0:
                    talk(e.axes, e.kind, e.bytes / e.calls, e.calls * microbatches)
        if sent := account.sent:
            # Forth, and a gradient back.
            talk((PIPELINE,), "send", sent, 2 * microbatches)
        if trained := account.held.trained:
            talk(mesh.data_axes, "all_reduce", trained, 1)
    return {COMPUTE: _shares(compute), MESSAGES: _shares(messages)}


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {how: s / total for how, s in seconds.items() if s > 0}
