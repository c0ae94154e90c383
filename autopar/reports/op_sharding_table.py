"""The op shardings of a plan, as a table."""

from __future__ import annotations

from textwrap import fill

from autopar.passes.plan import Plan
from autopar.passes.shard.plan_shardings import OpName
from autopar.reports.tables import Table

OPS = 44  # letters of a line of ops


def op_sharding_table(plan: Plan) -> Table:
    """Shows, by axis and module, the ops that are sharded alike and the split dim."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for axis, own in plan.op_shardings.items():
        for name, dim in own.items():
            named = OpName.parse(name)
            key = (axis, named.module or "(outside of modules)", dim or "whole")
            rows.setdefault(key, []).append(named.op)
    return Table(
        "op shardings: what an axis splits of an op",
        ("axis", "module", "ops", "splits"),
        tuple(
            (axis, module, fill(", ".join(ops), OPS), dim)
            for (axis, module, dim), ops in rows.items()
        ),
    )
