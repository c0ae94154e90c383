"""The commands about planning: `autopar plan`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from autopar.cluster_file import number, read_cluster
from autopar.hardware import cluster_of, with_memory
from autopar.models import LoadedModel, ModelError, example_batch, load_model
from autopar.planner import find_plans, gigabytes, label_plan, plan_of, sketch
from autopar.tables import Table
from passes.cluster import Cluster, ClusterError
from passes.estimate import Estimate
from passes.mesh import Mesh
from passes.plan import Plan
from passes.search import Found

SAMPLES = 4  # of the batch that a model is captured with: costs are linear in them


def add_plan(commands: Any, model_help: str) -> None:
    add = commands.add_parser("plan", help="find the best plan for some devices")
    add.set_defaults(command=plan_command)
    add.add_argument("model", metavar="MODEL", help=model_help)
    where = add.add_mutually_exclusive_group(required=True)
    where.add_argument("--devices", metavar="NxNAME", help="as 8xA100-80GB")
    where.add_argument("--cluster", type=Path, metavar="FILE", help="TOML or JSON")
    add.add_argument("--memory", metavar="BYTES", help='of a device to use, as "70GB"')
    add.add_argument("--global-batch", type=int, metavar="N", help="samples of a step")
    add.add_argument("--seq", type=int, metavar="N", help="tokens (hf: models)")
    add.add_argument("--mesh", help='axes that are decided already, as "tp=2"')
    add.add_argument("--seed", type=int, default=0, help="of weights and dropout")
    add.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write plan.json"
    )
    add.add_argument("--json", action="store_true")


def add_labels(add: Any) -> None:
    add.add_argument(
        "--labels",
        metavar="NxNAME|FILE",
        help="decide for each op what an axis splits, for these devices",
    )


def labelled(
    plan: Plan, loaded: LoadedModel, batch: Mapping[str, Any], options: Any
) -> Plan:
    """The plan with labels, if they are asked for."""
    if not options.labels:
        return plan
    if Path(options.labels).suffix in (".toml", ".json"):
        cluster = read_cluster(Path(options.labels))
    else:
        cluster = cluster_of(options.labels)
    return label_plan(sketch(loaded.model, batch), plan, cluster).plan


def plan_command(arguments: argparse.Namespace) -> int:
    began = time.perf_counter()
    cluster = _cluster(arguments)
    loaded = load_model(arguments.model, seed=arguments.seed, device="meta")
    batch, samples = _batch(loaded, arguments)
    of = sketch(loaded.model, batch)
    mesh = Mesh.parse(arguments.mesh) if arguments.mesh else None
    found = find_plans(of, cluster, samples, mesh)
    plan = plan_of(found.best[0].candidate, of)
    if arguments.output:
        arguments.output.write_text(plan.to_json(), encoding="utf-8")
    if arguments.json:
        print(json.dumps([estimate_data(e, cluster) for e in found.best], indent=1))
        return 0
    print(plans_table(found, cluster, f"{arguments.model} on {cluster}"))
    print(f"\n{time.perf_counter() - began:.1f} s", end="")
    if arguments.output:
        print(f"; wrote {arguments.output}")
        print(f"next: autopar compile {arguments.model} --plan {arguments.output}")
    else:
        print("; -o plan.json writes the first")
    return 0


def _cluster(arguments: argparse.Namespace) -> Cluster:
    if arguments.cluster:
        cluster = read_cluster(arguments.cluster)
    else:
        cluster = cluster_of(arguments.devices)
    if arguments.memory:
        memory = number("--memory", arguments.memory)
        if memory <= 0:
            raise ClusterError(f"--memory {arguments.memory}", fix="give bytes above 0")
        cluster = with_memory(cluster, memory)
    return cluster


def _batch(
    loaded: LoadedModel, arguments: argparse.Namespace
) -> tuple[dict[str, Tensor], int]:
    """A batch to capture with, and the samples of a step."""
    if loaded.batch is not None:
        batch = dict(loaded.batch)
        own = max((len(x) for x in batch.values() if x.ndim), default=1)
        if arguments.seq:
            raise ModelError(
                f"'{loaded.spec}' brings its own batch", fix="leave out --seq"
            )
        return batch, arguments.global_batch or own
    if loaded.vocab is None:
        raise ModelError(
            f"'{loaded.spec}' brings no batch to plan for",
            fix="let the factory return (model, batch)",
        )
    if arguments.global_batch is None:
        raise ModelError("no --global-batch is given", fix="add --global-batch 512")
    seq = arguments.seq or 128
    return example_batch(loaded.vocab, SAMPLES, seq), arguments.global_batch


def plans_table(found: Found, cluster: Cluster, title: str) -> Table:
    """The best plan and its runners-up."""
    head = ("plan", "s/step", "memory", "idle", "communication", "MFU")
    rows = []
    for e in found.best:
        rows.append(
            (
                str(e.candidate),
                f"{e.seconds:.4g}",
                gigabytes(e.peak),
                f"{e.bubble:.1%}",
                f"{e.communication / e.seconds:.1%}",
                f"{e.utilisation(cluster):.1%}",
            )
        )
    return Table(title, head, tuple(rows), (f"the best of {found.tried} candidates",))


def estimate_data(e: Estimate, cluster: Cluster) -> dict[str, Any]:
    return {
        "plan": str(e.candidate),
        "seconds": e.seconds,
        "memory": [dict(terms) for terms in e.memory],
        "bubble": e.bubble,
        "parts": dict(e.parts),
        "mfu": e.utilisation(cluster),
    }
