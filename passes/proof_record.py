"""The proof of a program: what was run, how far it was off, and what it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

WHOLE, SMALL = "whole", "small"
NUMBERS, CALLS = "numbers", "calls"


@dataclass(frozen=True)
class CutShort:
    """A module that could not run to its end without numbers. function: where in it.
    statement: which one wants values; source: of the model; why: torch's word."""

    stage: int
    module: str
    function: str
    statement: str
    source: str
    why: str

    def __str__(self) -> str:
        return (
            f"stage {self.stage}, {self.module}: {self.function} stops at full size at "
            f"{self.source}: '{self.statement}' ({self.why})"
        )


@dataclass(frozen=True)
class Loops:
    """How loops over experts were compared with the one step that each became, small
    and in float64, as the model itself was not. compared: so many losses and gradients.
    worst, error: the value that is furthest off, relative. why: they were not, for this
    reason."""

    compared: int = 0
    worst: str = ""
    error: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        if self.compared:
            text = f"{self.compared} values, worst '{self.worst}' {self.error:.0e}"
            return f"; loops over experts as one step: {text}"
        return f"; loops over experts not compared: {self.why}" if self.why else ""


@dataclass(frozen=True)
class Beside:
    """How the captured graph was compared with the untouched model. by: NUMBERS, a
    step of both in float64, or CALLS, what the model calls of torch, eagerly and while
    it is captured; "": not at all, for the reason `why`. compared: so many losses and
    gradients, or calls. worst, error: the value that is furthest off, relative.
    layers: how many of how many were run; (0, 0): all. loops: how loops over experts
    were, where no numbers were."""

    by: str = ""
    compared: int = 0
    worst: str = ""
    error: float = 0.0
    layers: tuple[int, int] = (0, 0)
    why: str = "a plan of an earlier version"
    loops: Loops = Loops()

    def __str__(self) -> str:
        return f"{self._of_model()}{self.loops}"

    def _of_model(self) -> str:
        kept, every = self.layers
        layers = f" of {kept} of {every} layers" if every > kept else ""
        if self.by == NUMBERS:
            text = f"{self.compared} values, worst '{self.worst}' {self.error:.0e}"
            return f"captured as the model computes{layers}: {text}"
        if self.by == CALLS:
            return f"captured as the model runs: {self.compared} calls{layers}"
        return f"not compared with the model itself: {self.why}"


@dataclass(frozen=True)
class Proof:
    """size: "whole", the program itself was run; "small", one that differs from it in
    its numbers alone. mesh, microbatches, ranks: of what was run. worst, error: the
    name of the value that is furthest off (a loss, a gradient, the norm of all, ...),
    and by how much, relative, in float64; tolerance: what rounding explains. compared:
    how many were. restored: how many tensors of all ranks came back from a checkpoint,
    bitwise. sizes: extents, large -> small. layers: how many of how many were run.
    texts: the distinct modules that were found to be small ones but for numbers.
    cut_short: those of them that did not run to their end at their own size, of which
    the rest is proved small only. model: how the graph was compared with the model.
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
    restored: int = 0
    cut_short: tuple[CutShort, ...] = ()
    model: Beside = Beside()

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self._of_ranks()}; {self.model}"

    def _of_ranks(self) -> str:
        compared = (
            f"{self.compared} values of 2 steps and an update, worst '{self.worst}' "
            f"{self.error:.0e}; {self.restored} tensors saved and loaded"
        )
        if self.size == WHOLE:
            return f"proved on all {self.ranks} ranks: {compared}"
        kept, every = self.layers
        layers = f", {kept} of {every} layers" if every > kept else ""
        return (
            f"proved small ({self.mesh or 'one rank'}{layers}): {compared}; "
            f"modules that are the same but for sizes: {self.texts}{self._cut_short()}"
        )

    def _cut_short(self) -> str:
        if not self.cut_short:
            return ""
        first = self.cut_short[0]
        return (
            f", of which at full size run only up to what depends on values "
            f"({first.source}): {len(self.cut_short)}"
        )
