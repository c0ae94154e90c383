"""What an axis splits first, as a plan writes it: `seq`, or `ring:seq`."""

from __future__ import annotations

from dataclasses import dataclass

# In place of an op's name: see `passes.shard.ring`, `passes.shard.routed`, and for
# weights `passes.mesh.Axis`.
RING, ROUTED, WEIGHTS = "ring", "routed", "weights"


@dataclass(frozen=True)
class Preference:
    """A dim that is to be split. only: in ops of this name, or in a way that has this
    one; empty: wherever it flows."""

    dim: str
    only: str = ""

    @classmethod
    def parse(cls, text: str) -> Preference:
        only, _, dim = text.rpartition(":")
        return cls(dim, only)

    def __str__(self) -> str:
        return f"{self.only}:{self.dim}" if self.only else self.dim
