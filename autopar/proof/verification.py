"""The result of comparing with the untouched model, and if rounding explains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.proof.errors import VerificationFailed

# Where the model itself, under autocast on one device, is further from its own
# precision than the tolerance, these multiples of its distance are allowed: as two
# roundings of one value, each can be as far off, and in opposite directions.
APART, AWAY = 3.0, 2.0


@dataclass(frozen=True)
class Verification:
    """errors: "loss" or parameter -> norm of the difference over norm of the reference
    (see `NOISE`); in mixed precision the reference is the model under autocast, and the
    norm that of the model in its own precision.

    loss, reference_loss: of the same batch. tolerance: what rounding explains.
    away, reference_away: in mixed precision, how far the program and the reference are
    from the model in its own precision; else empty. rerouted: the share of rows that
    took experts which the model chose, where they preferred others. drawn: what was
    drawn for the comparison; the rest was taken as given. unmoved: parameters whose
    gradient is 0 in the model itself, with which little is compared. restored: how many
    tensors of all ranks came back from a checkpoint, bitwise.

    in_double: where errors were more than a tolerance explains, and in mixed precision,
    the same comparison with all in float64. rounded: `away` is how far the program is
    from the model there, and `reference_away` how far the model itself gets, rounded
    otherwise. untold: why that could not be done.
    """

    loss: float
    reference_loss: float
    errors: Mapping[str, float]
    tolerance: float
    away: Mapping[str, float] = field(default_factory=dict)
    reference_away: Mapping[str, float] = field(default_factory=dict)
    rerouted: float = 0.0
    drawn: tuple[str, ...] = ()
    unmoved: tuple[str, ...] = ()
    restored: int = 0
    in_double: Verification | None = None
    rounded: bool = False
    untold: str = ""

    def limits(self, name: str) -> tuple[float, float]:
        """The limits of an error and of a distance from the model's own precision."""
        known = self.reference_away.get(name, 0.0)
        return max(self.tolerance, APART * known), max(self.tolerance, AWAY * known)

    def excess(self, name: str) -> float:
        """The greater of the two over its limit: more than 1 fails."""
        apart, away = self.limits(name)
        if not apart:
            return float("inf") if self.errors[name] else 0.0
        shares = (self.errors[name] / apart, self.away.get(name, 0.0) / away)
        return float("inf") if any(x != x for x in shares) else max(shares)

    @property
    def worst(self) -> tuple[str, float]:
        """The name and error of what differs most, relative to its tolerance."""
        if self.in_double is not None and not self.in_double.passed:
            return self.in_double.worst
        name = max(self.errors, key=self.excess)
        return name, self.errors[name]

    @property
    def passed(self) -> bool:
        """Whether every error is within tolerance, in double precision too if that was
        run."""
        if self.in_double is not None and not self.in_double.passed:
            return False
        return all(self.excess(name) <= 1.0 for name in self.errors)

    def worse(self, other: Verification) -> Verification:
        """Returns the larger of two steps' errors, by name, with this loss."""
        worse = [
            name
            for name in other.errors
            if name not in self.errors or other.excess(name) > self.excess(name)
        ]

        def join(
            mine: Mapping[str, float], others: Mapping[str, float]
        ) -> dict[str, float]:
            return {**mine, **{n: others[n] for n in worse if n in others}}

        return replace(
            self,
            errors=join(self.errors, other.errors),
            tolerance=max(self.tolerance, other.tolerance),
            away=join(self.away, other.away),
            reference_away=join(self.reference_away, other.reference_away),
            rerouted=max(self.rerouted, other.rerouted),
            restored=self.restored + other.restored,
        )

    def check(self) -> Verification:
        """Raises VerificationFailed that names the worst parameter."""
        if not self.passed:
            (name, error), double = self.worst, self.in_double
            failed, where, but = self, "", ""
            if double is not None and double.passed:
                but = "; not so in float64: it rounds what the model does not"
            elif double is not None:
                failed, where = double, " in float64"
            elif self.untold:
                but = f"; rounding cannot be told from a fault: {self.untold}"
            raise VerificationFailed(
                f"'{name}' differs from the untouched model by {error:.1e}{where}, "
                f"more than rounding explains ({failed.limits(name)[0]:.0e}){but}"
            )
        return self
