"""What a plan's labels say, as a table."""

from __future__ import annotations

from textwrap import fill

from autopar.passes.plan import Plan
from autopar.reports.tables import Table

OPS = 44  # letters of a line of ops


def label_table(plan: Plan) -> Table:
    """Each axis and module: the ops whose label is the same, and what is split."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for axis, labels in plan.labels.items():
        for name, dim in labels.items():
            module, _, op = name.partition(":")
            key = (axis, module or "(outside of modules)", dim or "whole")
            rows.setdefault(key, []).append(op)
    return Table(
        "labels: what an axis splits of an op",
        ("axis", "module", "ops", "splits"),
        tuple(
            (axis, module, fill(", ".join(ops), OPS), dim)
            for (axis, module, dim), ops in rows.items()
        ),
    )
