"""What `verify` found, as a table and as values for JSON."""

from __future__ import annotations

from autopar.reports.tables import Table
from autopar.verify import APART, AWAY, Verification

AWAY_COLUMNS = ("without rounding", "of autocast")
MIXED = (
    f"The untouched model runs under autocast. Its own distance from the model in full "
    f"precision ('of autocast') may be exceeded {APART:g} times by the error, and "
    f"{AWAY:g} times by the program's distance ('without rounding')."
)


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
    verdict = "PASSED" if result.passed else "FAILED"
    note = (
        f"{verdict}: {len(ordered)} compared, tolerance {result.tolerance:.0e}, "
        f"worst {max(result.errors.values()):.1e}"
    )
    if result.drawn:
        note += f"; with drawn {' and '.join(result.drawn)}"
    notes = [note, MIXED] if mixed else [note]
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


def verification_data(result: Verification) -> dict:
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
    }
