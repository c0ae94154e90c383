"""Memory of each pipeline rank, and what is computed again for its sake, as tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

from autopar.passes.mesh import PIPELINE
from autopar.passes.plan import RECOMPUTE
from autopar.passes.program import Program
from autopar.passes.schedule.memory import RankMemory
from autopar.reports.tables import Table
from autopar.units import size


def memory_table(program: Program) -> Table:
    """Lists what the first rank of each pipeline rank holds at its peak."""
    terms = [f.name for f in fields(RankMemory)]
    rows = tuple(
        (
            rank,
            *(size(getattr(memory, term)) for term in terms),
            size(memory.total),
            recomputed(program, rank),
        )
        for rank, memory in enumerate(program.memory)
    )
    limit = program.plan.memory
    return Table(
        "memory of a rank at its most"
        + (f", which may be {size(limit)}" if limit else ""),
        (PIPELINE, *terms, "sum", "recompute"),
        rows,
        (
            "optimizer: two values for each one trained, as AdamW has. activations: of "
            "all microbatches in flight, under the schedule.",
        ),
    )


def recomputed(program: Program, rank: int) -> str:
    """`2 full, 1 none`: how many layers of a pipeline rank have which policy."""
    placement = program.schedule.stage_to_rank
    policies = Counter(
        program.plan.policy(layer)
        for stage, there in zip(program.stages, placement, strict=True)
        for layer in stage.layers
        if there == rank and layer
    )
    policies_used = [f"{policies[p]} {p}" for p in reversed(RECOMPUTE) if policies[p]]
    return ", ".join(policies_used) if len(policies_used) > 1 else "".join(policies)
