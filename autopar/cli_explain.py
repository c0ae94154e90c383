"""`autopar explain`: what `autopar plan -o` wrote, told in parts."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.choose import SAMPLES
from autopar.cli_plan import add_cluster, read_cluster_given
from autopar.estimate_file import Findings, read_findings
from autopar.explain import explanation, explanation_data
from autopar.models import load_model
from autopar.planned import batch_for
from autopar.planner import make_prices, sketch
from passes.cluster import Cluster, ClusterError
from passes.search import run_on_paper


def add_explain(commands: Any) -> None:
    add = commands.add_parser("explain", help="where a plan's seconds and bytes go")
    add.set_defaults(command=explain_command)
    add.add_argument("plan", type=Path, help="what `autopar plan -o` wrote")
    add.add_argument(
        "--reprice", action="store_true", help="capture the model, price it again"
    )
    add_cluster(add, required=False)
    add.add_argument("--json", action="store_true")


def explain_command(arguments: argparse.Namespace) -> int:
    findings = read_findings(arguments.plan)
    cluster = read_cluster_given(arguments)
    if cluster or arguments.reprice:
        findings = reprice(findings, cluster or findings.cluster)
    if arguments.json:
        print(json.dumps(explanation_data(findings), indent=1))
    else:
        print(explanation(findings))
    return 0


def reprice(findings: Findings, cluster: Cluster) -> Findings:
    """The same plans on other devices, or by another version's prices.

    The one that was chosen stays first. Raises: ClusterError.
    """
    if cluster.devices != findings.cluster.devices:
        raise ClusterError(
            f"the plans are for {findings.cluster.devices} devices, not "
            f"{cluster.devices}",
            fix=f"plan anew: autopar plan {findings.model} --devices ...",
        )
    loaded = load_model(findings.model, seed=findings.seed, device="meta")
    batch = batch_for(loaded, SAMPLES, findings.seq)
    prices = make_prices(sketch(loaded.model, batch), cluster)
    best = (run_on_paper(e.candidate, prices, cluster) for e in findings.best)
    return replace(findings, cluster=cluster, best=tuple(best))
