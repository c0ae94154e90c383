"""`autopar simulate`: the whole step of a plan on paper, and as a trace to look at."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from autopar.commands.arguments import add_json, path
from autopar.commands.devices import add_devices, read_devices
from autopar.machine.measured_cluster import measured_cluster
from autopar.passes.price.cluster import Cluster, ClusterError
from autopar.passes.schedule.step_run import StepRun
from autopar.planner.reprice import reprice
from autopar.plans.plan_record import ESTIMATE, read_record
from autopar.plans.store import load_plan
from autopar.reports.simulation import (
    run_data,
    run_text,
    simulate_estimate,
    simulate_program,
)
from autopar.reports.trace_file import write_trace


def add(commands: Any) -> None:
    add = commands.add_parser("simulate", help="a plan's step, event by event")
    add.set_defaults(command=simulate_command)
    add.add_argument("plan", type=path, help="a directory, planned or compiled")
    add.add_argument("--trace", type=path, metavar="FILE", help="for Perfetto")
    add.add_argument(
        "--compiled",
        action="store_true",
        help="by what compiling measured, though there is an estimate",
    )
    add_devices(add, required=False)
    add_json(add)


def simulate_command(arguments: argparse.Namespace) -> int:
    cluster = read_devices(arguments)
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
        record = read_record(folder)
        if cluster is not None:
            record = reprice(record, cluster)
        best = record.best[0]
        title = f"{record.model} on {record.cluster}: {best.candidate}"
        contention = record.cluster.contention(best.candidate.mesh)
        return simulate_estimate(best, contention), title
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
