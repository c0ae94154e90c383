"""`autopar explain`: what `autopar plan -o` wrote, told in parts."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.commands.cli_plan import add_cluster, read_cluster_given
from autopar.commands.option_types import path
from autopar.machine.hardware import with_memory
from autopar.machine.measured_cluster import measured_cluster
from autopar.models.load import load_model
from autopar.planner.choose import SAMPLES
from autopar.planner.estimate_file import EstimateError, Findings, read_findings
from autopar.planner.planned import batch_for, read_decided
from autopar.planner.planner import Sketch, make_prices, sketch
from autopar.reports.explain import explanation, explanation_data
from autopar.reports.label_table import label_table
from autopar.reports.tables import Table
from passes.price.cluster import Cluster, ClusterError
from passes.price.symbolic import activation_bytes, parameters, step_flops
from passes.search.search import run_on_paper


def add_explain(commands: Any) -> None:
    add = commands.add_parser("explain", help="where a plan's seconds and bytes go")
    add.set_defaults(command=explain_command)
    add.add_argument("plan", type=path, help="what `autopar plan -o` wrote")
    add.add_argument(
        "--reprice", action="store_true", help="capture the model, price it again"
    )
    add.add_argument(
        "--formulas", action="store_true", help="what the numbers are made of"
    )
    add_cluster(add, required=False)
    add.add_argument("--json", action="store_true")


def explain_command(arguments: argparse.Namespace) -> int:
    findings = read_findings(arguments.plan)
    cluster = read_cluster_given(arguments)
    if cluster or arguments.reprice:
        findings = reprice(
            findings, cluster or again(findings.cluster, arguments.profile)
        )
    found = formulas(findings) if arguments.formulas else {}
    if arguments.json:
        data = {**explanation_data(findings), "formulas": found}
        print(json.dumps(data, indent=1))
        return 0
    print(explanation(findings))
    if findings.best[0].candidate.labelled:
        print(f"\n{label_table(read_decided(arguments.plan).plan)}")
    if found:
        print(f"\n{Table('in named dims', ('what', 'formula'), tuple(found.items()))}")
    return 0


def formulas(findings: Findings) -> dict[str, str]:
    """Parameters, operations and saved bytes of the model, in its named dims."""
    of = _sketch(findings)
    return {
        "parameters": str(parameters(of)),
        "FLOPs of a step": str(step_flops(of)),
        "bytes that a layer saves": str(activation_bytes(of)),
    }


def _sketch(findings: Findings) -> Sketch:
    loaded = load_model(findings.model, seed=findings.seed, device="meta")
    batch = batch_for(loaded, SAMPLES, findings.seq)
    return sketch(loaded.model, batch, **findings.options)


def again(cluster: Cluster, profile: Path | None) -> Cluster:
    """The cluster of findings, which do not keep what was measured of it.

    Raises: ClusterError, if that is not in this machine's profile.
    """
    if not cluster.profile:
        return cluster
    found = measured_cluster(cluster.devices, profile)
    if found.profile != cluster.profile:
        raise ClusterError(
            f"the plan was priced by a profile of {cluster.profile}, which is not here",
            fix=f"measure again, or give --devices {cluster}",
        )
    return with_memory(found, cluster.device.memory)


def reprice(findings: Findings, cluster: Cluster) -> Findings:
    """The same plans on other devices, or by another version's prices.

    The one that was chosen stays first; those with labels are left out.
    Raises: ClusterError; EstimateError, if the chosen one has labels.
    """
    if cluster.devices != findings.cluster.devices:
        raise ClusterError(
            f"the plans are for {findings.cluster.devices} devices, not "
            f"{cluster.devices}",
            fix=f"plan anew: autopar plan {findings.model} --devices ...",
        )
    if findings.best[0].candidate.labelled:
        raise EstimateError(
            f"the plan's labels were decided for {findings.cluster}",
            fix=f"plan anew: autopar plan {findings.model} --labels --devices ...",
        )
    plain = [e.candidate for e in findings.best if not e.candidate.labelled]
    prices = make_prices(_sketch(findings), cluster)
    best = tuple(run_on_paper(candidate, prices, cluster) for candidate in plain)
    return replace(findings, cluster=cluster, best=best)
