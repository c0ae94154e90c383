"""All that a page shows of a plan, as values for JSON.

Numbers are those of `autopar inspect`, `explain` and `simulate`, by their functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from autopar.passes.mesh import Mesh
from autopar.passes.price.cluster import Cluster
from autopar.passes.program import Program
from autopar.planner.reprice import formulas
from autopar.plans.plan_record import ESTIMATE, PlanRecord, read_record
from autopar.plans.store import MANIFEST, PlanDirectoryError, StoredPlan, load_plan
from autopar.progress import tell
from autopar.reports.html.choice_view import choice_data
from autopar.reports.html.mesh_view import coords_key, mesh_data
from autopar.reports.html.model_view import model_data
from autopar.reports.html.run_log import find_logs, read_log
from autopar.reports.html.source_files import find_sources
from autopar.reports.html.step_view import step_data
from autopar.reports.inspection import report_data
from autopar.reports.simulated import Simulated, simulated


@dataclass(frozen=True)
class Wanted:
    """cluster: devices to price for. compiled: by what compiling measured, though there
    is an estimate. formulas: capture the model for them. logs: of runs of the plan,
    beside those in its directory."""

    cluster: Cluster | None = None
    compiled: bool = False
    formulas: bool = False
    logs: Sequence[Path] = ()


def plan_data(folder: Path, wanted: Wanted) -> dict[str, Any]:
    """Gathers the page's data on a directory that was planned, compiled, or run in.
    Raises: AutoparError."""
    logs = [*find_logs(folder), *wanted.logs]
    data: dict[str, Any] = {
        "name": folder.resolve().name,
        "folder": str(folder),
        "logs": [{"name": p.name, "rows": read_log(p)} for p in logs],
    }
    compiled, estimated = ((folder / n).is_file() for n in (MANIFEST, ESTIMATE))
    if not (compiled or estimated):
        if logs:
            return data
        raise PlanDirectoryError(
            f"'{folder}' holds no plan and no log of a run",
            fix="give a directory of autopar plan or compile, or one with the *.jsonl "
            "of autopar run --log-file",
        )
    tell(f"reading '{folder}'")
    stored = load_plan(folder) if compiled else None
    tell("running the step on paper")
    step = simulated(folder, wanted.cluster, wanted.compiled, stored)
    data |= {"title": step.title, "estimated": step.estimated}
    data["step"] = step_data(step.run)
    if estimated:
        record = read_record(folder)
        data |= _of_record(record, wanted, step)
    if stored is not None:
        data |= _of_program(stored, step)
    return data


def _of_record(record: PlanRecord, wanted: Wanted, step: Simulated) -> dict[str, Any]:
    best = record.best[0]
    tokens = record.global_batch * record.seq if record.seq else None
    step_bytes = _by_rank(
        [s.footprint.step for s in best.stages],
        best.candidate.placement,
        best.candidate.mesh,
    )
    return {
        "model": record.model,
        "mesh": mesh_data(best.candidate.mesh, step.cluster, []),
        "choice": choice_data(record, formulas(record) if wanted.formulas else {}),
        "memory": {
            "terms": [dict(terms) for terms in best.memory],
            "gathered": step_bytes,
            "limit": record.cluster.device.memory,
        },
        "tokens": tokens,
    }


def _of_program(stored: StoredPlan, step: Simulated) -> dict[str, Any]:
    program = stored.program
    inspect = report_data(program, step.cluster)
    groups = {tuple(c["axes"]) for c in inspect["communication"]}
    tell("drawing the model")
    model = model_data(program)
    data: dict[str, Any] = {
        "model": stored.model_spec,
        "warnings": list(stored.warnings),
        "inspect": inspect,
        "mesh": mesh_data(program.mesh, step.cluster, groups),
        "view": model,
        **_texts(program.modules),
        "module_of": coords_key(program),
        "sources": find_sources(stored.model_spec, _files(model)),
        "tokens": tokens_of(program),
        "microbatches": program.plan.microbatches,
    }
    if not step.estimated:
        data["memory"] = {
            "terms": [asdict(memory) for memory in program.memory],
            "gathered": _by_rank(
                [s.footprint.step for s in program.stages],
                program.schedule.stage_to_rank,
                program.mesh,
            ),
            "limit": program.plan.memory or None,
        }
    return data


def _texts(modules: Mapping[str, str]) -> dict[str, Any]:
    """lines: each distinct one once. modules: key -> which lines, from first to last;
    those of many ranks differ in a few."""
    lines: dict[str, int] = {}
    texts = {
        key: [lines.setdefault(line, len(lines)) for line in text.split("\n")]
        for key, text in modules.items()
    }
    return {"lines": list(lines), "modules": texts}


def tokens_of(program: Program) -> int:
    """Counts those of a step as `autopar run` does: the elements of the batch's first
    field."""
    shape, _ = next(iter(program.inputs.values()))
    return prod(shape)


def _by_rank(amounts: Sequence[int], placement: Sequence[int], mesh: Mesh) -> list[int]:
    by_rank = [0] * mesh.pipeline_ranks
    for amount, rank in zip(amounts, placement, strict=True):
        by_rank[rank] += amount
    return by_rank


def _files(model: dict[str, Any]) -> set[str]:
    cells = (
        cell
        for module in model["modules"].values()
        for rows in module["rows"].values()
        for row in rows
        for cell in row["cells"]
    )
    return {cell["source"][0] for cell in cells if "source" in cell}
