"""What an axis splits first, as a plan writes it: `seq`, or `ring:seq`."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = "weights"  # in place of an op's name, see `passes.mesh.Axis`


@dataclass(frozen=True)
class Preference:
    """A dim that is to be split. only: in ops of this name, or by the
    alternative of this one (`passes.shard.alternatives`); empty: wherever it flows."""

    dim: str
    only: str = ""

    @classmethod
    def parse(cls, text: str) -> Preference:
        only, _, dim = text.rpartition(":")
        return cls(dim, only)

    def __str__(self) -> str:
        return f"{self.only}:{self.dim}" if self.only else self.dim
