"""What a rank of each pipeline stage holds in memory, at its most, term by term."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

from ..errors import AutoparError
from ..schedule.footprint import Footprint, peak_bytes
from ..schedule.schedule import Schedule
from ..stage.local_stage import LocalStage

# AdamW keeps two values for each one that it trains, in the parameter's own type.
OPTIMIZER_STATES = 2


class OutOfMemory(AutoparError):
    """A plan that needs more memory than it may use."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the first rank of a pipeline rank's group.

    What rests (between steps too): parameters, their gradients, the optimizer's state,
    buffers. activations: the most at once, under the schedule, with messages and with
    what is gathered and whole for a step.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    def __str__(self) -> str:
        terms = [f"{getattr(self, f.name):,} {f.name}" for f in fields(self)]
        return f"{self.total:,} = {' + '.join(terms)}"


def resting(
    locals_: Sequence[LocalStage], trainable: Collection[str], offload: bool
) -> RankMemory:
    """Returns what a rank's stages hold between steps; a weight of several rests once.

    offload: the optimizer's state is not on the device.
    """
    held: dict[str, int] = {}
    buffers: dict[str, int] = {}
    for local in locals_:
        names = local.stage.names
        held |= {names[v.name]: v.bytes for v in local.params}
        buffers |= {names[v.name]: v.bytes for v in local.buffers}
    trained = sum(size for name, size in held.items() if name in trainable)
    return RankMemory(
        parameters=sum(held.values()),
        gradients=trained,
        optimizer=0 if offload else OPTIMIZER_STATES * trained,
        buffers=sum(buffers.values()),
    )


def rank_memory(
    schedule: Schedule,
    locals_: Sequence[LocalStage],
    footprints: Sequence[Footprint],
    trainable: Collection[str],
    offload: bool = False,
) -> tuple[RankMemory, ...]:
    """Returns the memory of each pipeline rank. locals_, footprints: of each stage."""
    memory = []
    for rank in range(len(schedule.ranks)):
        own = [locals_[s] for s, r in enumerate(schedule.stage_to_rank) if r == rank]
        rest = resting(own, trainable, offload)
        memory.append(replace(rest, activations=peak_bytes(schedule, rank, footprints)))
    return tuple(memory)


def check_memory(memory: Sequence[RankMemory], limit: int) -> None:
    """Raises OutOfMemory for a rank that needs more bytes than `limit` (0: none)."""
    if not limit:
        return
    most = max(range(len(memory)), key=lambda rank: memory[rank].total)
    if (over := memory[most].total - limit) > 0:
        raise out_of_memory(most, memory[most], over)


def out_of_memory(rank: int, need: RankMemory, over: int) -> OutOfMemory:
    """Say by how much, which term is the largest, and the smallest change."""
    term = max(fields(need), key=lambda f: getattr(need, f.name)).name
    fixes = {
        "activations": 'recompute="auto", more microbatches or a larger tp',
        "buffers": "fewer buffers",
    }
    other = fixes.get(term, "zero=3 over a dp axis, or a larger pp or tp")
    return OutOfMemory(
        f"pipeline rank {rank} needs {over:,} bytes more than "
        f"memory={need.total - over:,}"
        f"\n  {need}",
        fix=f"use memory={need.total}; most are {term}: {other}",
    )
