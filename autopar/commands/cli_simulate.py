"""`autopar simulate`: the whole step of a plan on paper, and as a trace to look at."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from autopar.commands.cli_explain import reprice
from autopar.commands.cli_plan import add_cluster, read_cluster_given
from autopar.commands.option_types import path
from autopar.machine.measured_cluster import measured_cluster
from autopar.planner.estimate_file import ESTIMATE, read_findings
from autopar.reports.simulation import simulate_estimate, simulate_program
from autopar.reports.tables import Table, count, seconds
from autopar.reports.trace_file import write_trace
from autopar.store import load_plan
from passes.price.cluster import Cluster, ClusterError
from passes.schedule.simulate_schedule import grid
from passes.schedule.step_run import StepRun


def add_simulate(commands: Any) -> None:
    add = commands.add_parser("simulate", help="a plan's step, event by event")
    add.set_defaults(command=simulate_command)
    add.add_argument("plan", type=path, help="a directory, planned or compiled")
    add.add_argument("--trace", type=path, metavar="FILE", help="JSON for Perfetto")
    add.add_argument(
        "--compiled",
        action="store_true",
        help="by what compiling measured, though there is an estimate",
    )
    add_cluster(add, required=False)
    add.add_argument("--json", action="store_true")


def simulate_command(arguments: argparse.Namespace) -> int:
    cluster = read_cluster_given(arguments)
    run, title = _run(arguments, cluster)
    if arguments.trace:
        write_trace(run, arguments.trace)
    if arguments.json:
        print(json.dumps(run_data(run), indent=1))
        return 0
    print(title, run_text(run), sep="\n\n")
    if arguments.trace:
        print(f"\nwrote {arguments.trace}: open it in https://ui.perfetto.dev")
    return 0


def _run(arguments: argparse.Namespace, cluster: Cluster | None) -> tuple[StepRun, str]:
    """The step, and what it is of."""
    folder: Path = arguments.plan
    if (folder / ESTIMATE).is_file() and not arguments.compiled:
        findings = read_findings(folder)
        if cluster is not None:
            findings = reprice(findings, cluster)
        best = findings.best[0]
        title = f"{findings.model} on {findings.cluster}: {best.candidate}"
        crowd = findings.cluster.crowd(best.candidate.mesh)
        return simulate_estimate(best, crowd), title
    stored = load_plan(folder)
    size = stored.program.mesh.size
    links = cluster or measured_cluster(size)
    if links.devices < size:
        raise ClusterError(
            f"the plan is for {size} devices, but {links} has fewer",
            fix=f"give --devices {size}x{links.device.name}",
        )
    title = (
        f"{stored.model_spec}: computing as compiling measured it here, messages and "
        f"updates as on {links}"
    )
    return simulate_program(stored.program, links), title


def run_text(run: StepRun) -> str:
    timeline = run.timeline
    lines = [
        f"schedule {timeline.schedule.name}, to scale: F forward, B backward, I and W "
        "its halves, . idle",
        "",
        grid(timeline),
        "",
        f"{seconds(run.total)} a step: {seconds(run.start)} before microbatches, "
        f"{seconds(timeline.total)} with them, of which {timeline.bubble:.1%} idle, "
        f"{seconds(run.total - run.start - timeline.total)} after them",
        "",
    ]
    return "\n".join(lines) + f"\n{ranks_table(run)}"


def ranks_table(run: StepRun) -> Table:
    rows = [
        (
            rank,
            seconds(busy),
            seconds(idle),
            f"{idle / run.total:.1%}",
            count(peak, "B"),
        )
        for rank, (busy, idle, peak) in enumerate(
            zip(run.busy, run.idle, run.peak, strict=True)
        )
    ]
    return Table(
        "pipeline ranks",
        ("rank", "busy", "idle", "share idle", "peak memory"),
        tuple(rows),
    )


def run_data(run: StepRun) -> dict[str, Any]:
    """The same as values for JSON."""
    return {
        "seconds": run.total,
        "before": run.start,
        "pipeline": run.timeline.total,
        "bubble": run.timeline.bubble,
        "busy": list(run.busy),
        "idle": list(run.idle),
        "peak": list(run.peak),
        "in_flight": list(run.timeline.in_flight),
    }
