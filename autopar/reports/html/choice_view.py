"""The choice of a plan: candidates by time and memory, the front, and their prices."""

from __future__ import annotations

from typing import Any

from autopar.machine.measured_cluster import HOW, how_priced
from autopar.passes.search.candidates import ALIKE
from autopar.plans.plan_record import PlanRecord
from autopar.reports.explain import difference, explanation_data


def choice_data(record: PlanRecord, formulas: dict[str, str]) -> dict[str, Any]:
    """candidates: the chosen one, then the others; because: as `explain` has it.
    others: candidates that the search priced by its formula alone.
    alike: by what share of a step candidates differ that estimates cannot tell apart.
    explain: what `autopar explain --json` prints."""
    best = record.best[0]
    candidates = [
        {
            "plan": str(e.candidate),
            "seconds": e.seconds,
            "peak": e.peak,
            "bubble": e.bubble,
            "communication": e.communication,
            "mfu": e.utilisation(record.cluster),
            "parts": dict(e.parts),
            "because": [] if e is best else difference(best, e),
        }
        for e in record.best
    ]
    shown = {row["plan"] for row in candidates}
    for row in candidates:
        row["front"] = not any(_beats(other, row) for other in candidates)
    return {
        "candidates": candidates,
        "others": [
            {"plan": name, "seconds": seconds, "peak": peak}
            for name, seconds, peak in record.priced
            if name not in shown
        ],
        "explain": explanation_data(record),
        "limit": record.cluster.device.memory,
        "tried": record.tried,
        "alike": ALIKE,
        "priced": how_priced(best, record.cluster),
        "sources": {
            kind: {HOW[how]: share for how, share in shares.items()}
            for kind, shares in best.sources.items()
        },
        "formulas": formulas,
        "global_batch": record.global_batch,
        "seq": record.seq,
        "options": {name: str(x) for name, x in record.options.items()},
    }


def _beats(other: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether it takes less of one, and no more of the other."""
    pairs = [(other[quantity], row[quantity]) for quantity in ("seconds", "peak")]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
