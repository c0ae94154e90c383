"""The peak memory of a rank of each pipeline stage, term by term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from ..errors import AutoparError


class OutOfMemory(AutoparError):
    """A plan that needs more memory than it may use."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the first rank of a pipeline rank's group.

    What stays (between steps too): parameters, their gradients, the optimizer's state,
    buffers. activations: the most at once, under the schedule, with messages and with
    what is gathered and whole for a step.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0

    @classmethod
    def of(cls, terms: Mapping[str, float]) -> RankMemory:
        """terms: see `passes.price.account.rank_memory`, of a rank that runs."""
        return cls(**{f.name: round(terms[f.name]) for f in fields(cls)})

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    def __str__(self) -> str:
        terms = [f"{getattr(self, f.name):,} {f.name}" for f in fields(self)]
        return f"{self.total:,} = {' + '.join(terms)}"


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
