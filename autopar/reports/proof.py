"""The result of `verify`, as a table and as values for JSON."""

from __future__ import annotations

import sys
from typing import Any

from autopar.proof.verification import APART, AWAY, Verification
from autopar.reports.tables import Table
from autopar.terminal import styled

AWAY_COLUMNS = ("without rounding", "of the model")
ROOM = (
    f"Its own distance from the model in {{}} ('of the model') may be exceeded "
    f"{APART:g} times by the error, and {AWAY:g} times by the program's distance "
    f"('without rounding')."
)
ROUNDED = "More than a tolerance explains. " + ROOM.format(
    "float64, rounded otherwise,"
)
MIXED = "The untouched model runs under autocast. " + ROOM.format("full precision")


def verification_table(result: Verification, every: bool = False) -> Table:
    """The loss both ways, and the worst errors of gradients."""
    mixed = bool(result.reference_away)
    ordered = sorted(result.errors, key=lambda name: -result.excess(name))
    rows = []
    for name in ordered if every else ordered[:8]:
        values = [result.errors[name]]
        if mixed:
            values += [result.away[name], result.reference_away[name]]
        rows.append((name, *(f"{x:.1e}" for x in values)))
    verdict = (
        styled("PASSED", "green", sys.stdout)
        if result.passed
        else styled("FAILED", "red", sys.stdout)
    )
    note = (
        f"{verdict}: {len(ordered)} compared, tolerance {result.tolerance:.0e}, "
        f"worst {max(result.errors.values()):.1e}"
    )
    if result.drawn:
        note += f"; with drawn {' and '.join(result.drawn)}"
    notes = [note]
    if result.in_double is not None:
        notes.append(_in_double(result.in_double))
    elif result.untold:
        notes.append(f"With all in float64 it could not be run: {result.untold}.")
    if mixed:
        notes.append(ROUNDED if result.rounded else MIXED)
    if result.unmoved:
        notes.append(
            f"Of the model itself {len(result.unmoved)} gradients are almost 0: "
            f"{', '.join(result.unmoved[:4])}{' ...' * (len(result.unmoved) > 4)}."
        )
    if result.rerouted:
        notes.append(
            f"{result.rerouted:.2%} of the rows that choose experts preferred others "
            "than the model under autocast chooses; they were told to take these."
        )
    return Table(
        f"loss {result.loss:.9g}, of the untouched model {result.reference_loss:.9g}",
        ("gradient (or loss)", "relative error", *(AWAY_COLUMNS if mixed else ())),
        tuple(rows),
        tuple(notes),
    )


def _in_double(result: Verification) -> str:
    name, error = result.worst
    meaning = "the rest is rounding" if result.passed else "a fault"
    return f"With all in float64 the worst is '{name}', {error:.1e}: {meaning}."


def verification_data(result: Verification) -> dict[str, Any]:
    """Returns a verification as JSON's types."""
    double = result.in_double
    return {
        "passed": result.passed,
        "loss": result.loss,
        "reference_loss": result.reference_loss,
        "tolerance": result.tolerance,
        "errors": dict(result.errors),
        "away": dict(result.away),
        "reference_away": dict(result.reference_away),
        "rerouted": result.rerouted,
        "drawn": list(result.drawn),
        "unmoved": list(result.unmoved),
        "in_double": None if double is None else verification_data(double),
        "untold": result.untold,
    }
