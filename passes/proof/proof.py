"""The proof of a program: what was run, how far it was off, and what it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

WHOLE, SMALL = "whole", "small"


@dataclass(frozen=True)
class Proof:
    """size: "whole", the program itself was run; "small", one that differs from it in
    its numbers alone. mesh, microbatches, ranks: of what was run. errors: the largest
    relative error of a loss, a gradient, or the norm of all, by its name, in float64;
    tolerance: what rounding explains. compared: how many were. sizes: extents, large
    -> small. layers: how many of how many were run. texts: the distinct modules that
    were found to be small ones but for numbers.
    """

    size: str
    mesh: str
    microbatches: int
    ranks: int
    loss: float
    reference_loss: float
    worst: str
    error: float
    tolerance: float
    compared: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    layers: tuple[int, int] = (0, 0)
    texts: int = 0

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Proof:
        """Reads `to_data`. Raises TypeError, ValueError for other values."""
        return cls(**{**data, "layers": tuple(data.get("layers", (0, 0)))})

    def __str__(self) -> str:
        what = (
            f"{self.compared} values of 2 steps, worst '{self.worst}' {self.error:.0e}"
        )
        if self.size == WHOLE:
            return f"proved on all {self.ranks} ranks: {what}"
        kept, every = self.layers
        layers = f", {kept} of {every} layers" if every > kept else ""
        return (
            f"proved small ({self.mesh or 'one rank'}{layers}): {what}; "
            f"{self.texts} modules are the same but for sizes"
        )
