"""Explains a plan: its predicted seconds and bytes by cause, and what others cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.machine.measured_cluster import how_priced
from autopar.passes.price.estimate import Estimate
from autopar.passes.search.candidates import ALIKE
from autopar.plans.plan_record import PlanRecord, estimate_data
from autopar.reports.plans import recomputed
from autopar.reports.tables import Table, ranges
from autopar.units import count, seconds

LEAST = 0.005  # of a step: differences of parts below it are not told one by one
ROUNDING = 1e-9  # of a step: what is no time at all
SHOWN = 4  # differences that are told of a plan
OTHERS = 6  # runners-up in a table; JSON has all
TERMS = ("parameters", "gradients", "optimizer", "buffers", "gathered", "activations")


def explanation(record: PlanRecord) -> str:
    """Returns the tables behind the best plan: seconds, memory, stages, sizes,
    others."""
    best = record.best[0]
    tables = (
        seconds_table(record),
        memory_table(record),
        stages_table(record),
        model_table(record),
    )
    options = "".join(f", {name} {x}" for name, x in record.options.items())
    parts = [f"{record.model} on {record.cluster}: {best.candidate}{options}"]
    parts += map(str, tables)
    if len(record.best) > 1:
        parts.append(str(others_table(record)))
    return "\n\n".join(parts)


def seconds_table(record: PlanRecord) -> Table:
    """Shows the seconds of the slowest pipeline rank by cause."""
    best = record.best[0]
    ordered = sorted(best.parts.items(), key=lambda item: -item[1])
    least = ROUNDING * best.seconds
    rows = [(t, seconds(s), _share(s, best.seconds)) for t, s in ordered if s > least]
    rows.append(("the step", seconds(best.seconds), "100.0%"))
    return Table(
        "where the seconds go, on the slowest pipeline rank",
        ("part", "time", "share"),
        tuple(rows),
        (
            "collective and axes: time that the rank waits for it. idle: for other "
            f"ranks; over all of them the pipeline is idle {best.bubble:.1%}.",
            f"{best.utilisation(record.cluster):.1%} of the devices' peak are the "
            "model's own operations (MFU).",
            how_priced(best, record.cluster),
            *recomputed(best),
        ),
    )


def memory_table(record: PlanRecord) -> Table:
    """Shows the bytes of each pipeline rank by purpose; equal ranks share a row."""
    best = record.best[0]
    known = dict.fromkeys((*TERMS, *(term for x in best.memory for term in x)))
    terms = [t for t in known if any(x.get(t) for x in best.memory)]
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, held in enumerate(best.memory):
        row = [_bytes(held.get(t, 0.0)) for t in terms]
        ranks.setdefault((*row, _bytes(sum(held.values()))), []).append(rank)
    limit = record.cluster.device.memory
    return Table(
        "where the bytes go, by pipeline rank",
        ("rank", *terms, "peak"),
        tuple((ranges(those), *row) for row, those in ranks.items()),
        (
            f"{count(best.peak, 'B')} of {count(limit, 'B')} at most: "
            f"{_share(best.peak, limit)} of a device.",
        ),
    )


def stages_table(record: PlanRecord) -> Table:
    """One microbatch on each stage; equal ones in one row."""
    best = record.best[0]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, (stage, layers) in enumerate(
        zip(best.stages, best.candidate.layers, strict=True)
    ):
        times = (
            stage.forward,
            stage.backward,
            stage.weight,
            stage.exposed_total,
            stage.send,
        )
        row = (layers, *map(seconds, times), _bytes(stage.footprint.residuals))
        alike.setdefault(row, []).append(i)
    return Table(
        "one microbatch on each stage",
        ("stage", "layers", "F", "B (or I)", "W", "exposed", "send", "residuals"),
        tuple((ranges(those), *row) for row, those in alike.items()),
    )


def model_table(record: PlanRecord) -> Table:
    """Shows the numbers that costs are made of."""
    best = record.best[0]
    residuals = sum(stage.footprint.residuals for stage in best.stages)
    rows: list[tuple[str, str]] = [
        ("parameters", count(record.parameters)),
        ("FLOPs of a step", count(best.flops)),
        ("FLOPs of a sample", count(best.flops / record.global_batch)),
        ("residuals of a microbatch, all stages", _bytes(residuals)),
    ]
    if record.seq:
        tokens = record.global_batch * record.seq
        per = best.flops / (record.parameters * tokens)
        rows.append(("FLOPs per parameter and token", f"{per:.3g}"))
    return Table("the model", ("what", "amount"), tuple(rows))


def others_table(record: PlanRecord) -> Table:
    """Shows the runners-up: what each would take, and how it differs."""
    best, *others = record.best
    rows = [
        (
            _narrow(str(e.candidate)),
            _signed(e.seconds - best.seconds),
            _signed(e.peak - best.peak, _bytes),
            "\n".join(difference(best, e)),
        )
        for e in others[:OTHERS]
    ]
    notes = [f"of {record.tried} candidates. + is more than the plan above takes."]
    if any(e.seconds < best.seconds for e in others):
        notes.append(
            f"faster by less than {ALIKE:.0%} is within what estimates can tell: the "
            "plan above was taken as the simplest of those."
        )
    return Table(
        "why not another",
        ("plan", "time", "peak", "because"),
        tuple(rows),
        tuple(notes),
    )


def difference(best: Estimate, other: Estimate) -> list[str]:
    """`+0.9 s idle`: the parts in which another plan takes more or less seconds, the
    largest first; all of them add up to the difference of the steps."""
    deltas = _deltas(best, other)
    ordered = sorted(deltas.items(), key=lambda item: -abs(item[1]))
    shown = [x for x in ordered[:SHOWN] if abs(x[1]) >= LEAST * best.seconds]
    rest = sum(deltas.values()) - sum(s for _, s in shown)
    if not shown or abs(rest) >= LEAST * best.seconds:
        shown.append(("other", rest))
    return [f"{_signed(s)} {term}" for term, s in shown]


def _deltas(best: Estimate, other: Estimate) -> dict[str, float]:
    terms = dict.fromkeys((*best.parts, *other.parts))
    return {t: other.parts.get(t, 0.0) - best.parts.get(t, 0.0) for t in terms}


def explanation_data(record: PlanRecord) -> dict[str, Any]:
    """The same as values for JSON."""
    best, *others = record.best
    return {
        "model": record.model,
        "cluster": str(record.cluster),
        "plan": str(best.candidate),
        "parameters": record.parameters,
        **estimate_data(best),
        "peak": best.peak,
        "mfu": best.utilisation(record.cluster),
        "others": [
            {
                "plan": str(e.candidate),
                "seconds": e.seconds - best.seconds,
                "peak": e.peak - best.peak,
                "parts": _deltas(best, e),
            }
            for e in others
        ],
    }


def _narrow(plan: str) -> str:
    """Breaks a plan's text into lines of a few words."""
    lines: list[str] = [""]
    for piece in plan.split(", "):
        if len(lines[-1]) + len(piece) > 34 and lines[-1]:
            lines.append("")
        lines[-1] += f", {piece}" if lines[-1] else piece
    return "\n".join(lines)


def _signed(amount: float, shown: Callable[[float], str] = seconds) -> str:
    """`+3.1 ms`"""
    return f"{'+' if amount >= 0 else '-'}{shown(abs(amount))}"


def _bytes(amount: float) -> str:
    """Decimal, as makers of devices count: `2.08 GB`."""
    return count(amount, "B")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}"
