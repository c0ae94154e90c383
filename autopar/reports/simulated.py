"""The step of a plan directory on paper, whether it was planned or compiled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopar.machine.measured_cluster import measured_cluster
from autopar.passes.price.cluster import Cluster
from autopar.passes.schedule.step_run import StepRun
from autopar.planner.reprice import reprice
from autopar.plans.plan_record import ESTIMATE, read_record
from autopar.plans.store import StoredPlan, load_plan
from autopar.reports.simulation import simulate_estimate, simulate_program


@dataclass(frozen=True)
class Simulated:
    """title: what it is of. cluster: whose links carry messages. estimated: by the
    estimate of a search, not by what compiling measured."""

    run: StepRun
    title: str
    cluster: Cluster
    estimated: bool


def simulated(
    folder: Path,
    cluster: Cluster | None = None,
    compiled: bool = False,
    stored: StoredPlan | None = None,
) -> Simulated:
    """Runs the step. cluster: other devices. compiled: by what compiling measured,
    though there is an estimate. stored: what the directory holds, if it was read.
    Raises: AutoparError."""
    if (folder / ESTIMATE).is_file() and not compiled:
        record = read_record(folder)
        if cluster is not None:
            record = reprice(record, cluster)
        best = record.best[0]
        contention = record.cluster.contention(best.candidate.mesh)
        run = simulate_estimate(best, contention)
        title = f"{record.model} on {record.cluster}: {best.candidate}"
        return Simulated(run, title, record.cluster, True)
    stored = stored or load_plan(folder)
    size = stored.program.mesh.size
    links = cluster or stored.cluster or measured_cluster(size)
    links.check_holds(stored.program.mesh)
    priced = (
        f"priced for {stored.cluster}"
        if stored.cluster
        else "compiling measured it here"
    )
    title = (
        f"{stored.model_spec}: computing as {priced}, messages and updates as "
        f"on {links}"
    )
    return Simulated(simulate_program(stored.program, links), title, links, False)
