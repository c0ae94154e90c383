"""The commands about planning: `autopar plan`."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.commands.option_types import number, path, size, text
from autopar.machine.cluster_file import read_cluster
from autopar.machine.hardware import with_memory
from autopar.machine.measured_cluster import how_priced, named_cluster
from autopar.machine.profile_file import ProfileError
from autopar.models.batches import samples_of
from autopar.models.load import LoadedModel, ModelError, load_model
from autopar.planner.choose import SAMPLES
from autopar.planner.estimate_file import Findings, estimate_data
from autopar.planner.infeasible import gigabytes
from autopar.planner.label_found import label_found, open_to_labels
from autopar.planner.planned import batch_for, save_findings
from autopar.planner.planner import Sketch, find_plans, label_plan, plan_of, sketch
from autopar.planner.request import Asked, read_shape
from autopar.reports.label_table import label_table
from autopar.reports.progress import Bar
from autopar.reports.tables import Table
from autopar.store import checksum
from passes.mesh import Mesh
from passes.plan import CONTEXT_PARALLEL, PRECISION, RECOMPUTE, Plan
from passes.price.candidate import Candidate
from passes.price.cluster import TF32, Cluster, ClusterError
from passes.schedule.make_schedule import SCHEDULES
from passes.search.candidates import ALIKE
from passes.search.search import Found

SEQ = 128  # tokens of one, unless told otherwise


def add_plan(commands: Any, model_help: str) -> None:
    add = commands.add_parser("plan", help="find the best plan for some devices")
    add.set_defaults(command=plan_command)
    add.add_argument("model", type=text, metavar="MODEL", help=model_help)
    add_cluster(add, required=True)
    add.add_argument(
        "--global-batch",
        type=number("global_batch"),
        metavar="N",
        help="samples of a step",
    )
    add.add_argument(
        "--seq", type=number("seq"), metavar="N", help="tokens (hf: models)"
    )
    add.add_argument(
        "--mesh",
        type=text,
        help='axes that are decided already, as "tp=2"; or sizes alone: "4,2"',
    )
    _add_decisions(add)
    add.add_argument(
        "--labels",
        action=argparse.BooleanOptionalAction,
        help="decide for each op what an axis splits: of the best plans whatever they "
        "take, or of none; as it is, of those that labels could make the fastest",
    )
    add.add_argument(
        "--seed", type=number("seed"), default=0, help="of weights and dropout"
    )
    add.add_argument(
        "-o", "--output", type=path, metavar="DIR", help="write the best plan"
    )
    add.add_argument("--json", action="store_true")


def _add_decisions(add: Any) -> None:
    """Options that decide a part of the plan; what is left out is searched for."""
    add.add_argument("--precision", choices=tuple(PRECISION))
    add_tf32(add, None)
    add.add_argument("--microbatches", type=number("microbatches"), metavar="N")
    add.add_argument("--schedule", choices=tuple(SCHEDULES))
    add.add_argument("--stages-per-rank", type=number("stages_per_rank"), metavar="N")
    add.add_argument("--recompute", choices=RECOMPUTE)
    add.add_argument("--zero", type=number("zero"), metavar="0..3")
    add.add_argument("--context-parallel", choices=sorted(CONTEXT_PARALLEL))
    add.add_argument(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_false",
        default=None,
    )


def add_tf32(add: Any, usual: bool | None) -> None:
    told = "GPUs multiply float32 by TF32 tensor cores"
    add.add_argument("--tf32", action="store_true", default=usual, help=told)


DECISIONS = (
    *("precision", "tf32", "microbatches", "schedule", "stages_per_rank", "recompute"),
    *("zero", "context_parallel", "sequence_parallel"),
)


def read_asked(arguments: argparse.Namespace) -> Asked:
    """The devices, and what of the plan is decided."""
    cluster = read_cluster_given(arguments)
    assert cluster is not None, "the parser asks for one"
    values = {name: getattr(arguments, name) for name in DECISIONS}
    options = {name: value for name, value in values.items() if value is not None}
    shape = () if _has_names(arguments.mesh) else read_shape(arguments.mesh or "")
    mesh = Mesh.parse(arguments.mesh) if arguments.mesh and not shape else None
    return Asked(cluster, mesh, shape, options)


def _has_names(mesh: str | None) -> bool:
    """Whether it names axes: on a command line these are ours, or a slip of the pen."""
    return mesh is not None and "=" in mesh


def add_cluster(add: argparse.ArgumentParser, required: bool) -> None:
    where = add.add_mutually_exclusive_group(required=required)
    where.add_argument(
        "--devices",
        type=text,
        metavar="NxNAME|N",
        help="as 8xA100-80GB; 4: of this machine",
    )
    where.add_argument("--cluster", type=path, metavar="FILE", help="TOML or JSON")
    add.add_argument(
        "--memory", type=size, metavar="BYTES", help='of a device to use, as "70GB"'
    )
    add.add_argument(
        "--profile", type=path, metavar="FILE", help="of this machine, not the cache's"
    )


def add_labels(add: Any) -> None:
    add.add_argument(
        "--labels",
        type=text,
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
        cluster = named_cluster(options.labels)
    return label_plan(sketch(loaded.model, batch), plan, cluster).plan


def plan_command(arguments: argparse.Namespace) -> int:
    began = time.perf_counter()
    asked = read_asked(arguments)
    cluster = asked.cluster
    loaded = load_model(arguments.model, seed=arguments.seed, device="meta")
    samples, seq = _samples(loaded, arguments), arguments.seq or SEQ
    of = sketch(loaded.model, batch_for(loaded, SAMPLES, seq), **asked.of_all)
    with Bar("planning") as bar:
        found = find_plans(of, cluster, samples, watch=bar, **asked.space)
    labels: Mapping[Candidate, Plan] = {}
    reach = {None: ALIKE, True: math.inf, False: -1.0}[arguments.labels]
    if open_to_labels(found, reach):
        whole = sketch(loaded.model, batch_for(loaded, samples, seq), **asked.of_all)
        found, labels = label_found(found, whole, cluster, reach)
    chosen = found.best[0].candidate
    plan = labels.get(chosen) or plan_of(chosen, of)
    if arguments.output:
        findings = Findings(
            plan=checksum(plan.to_json()),
            model=arguments.model,
            seed=arguments.seed,
            seq=seq if loaded.batch is None else None,
            samples=samples,
            runs=of.runs,
            parameters=sum(p.numel() for p in loaded.model.parameters()),
            cluster=cluster,
            best=found.best,
            tried=found.tried,
            options=asked.of_all,
        )
        save_findings(findings, plan, arguments.output)
    if arguments.json:
        print(json.dumps(_data(found, cluster), indent=1))
        return 0
    title = f"{arguments.model} on {cluster}"
    print(plans_table(found, cluster, title, precision_notes(of, cluster)))
    if plan.labels:
        print(f"\n{label_table(plan)}")
    print(f"\n{time.perf_counter() - began:.1f} s", end="")
    if arguments.output:
        print(f"; wrote {arguments.output}")
        print(f"next: autopar explain {arguments.output}")
        print(
            f"      autopar compile {arguments.model} --plan {arguments.output} "
            f"-o {arguments.output}"
        )
    else:
        print("; -o plan writes the first")
    return 0


def read_cluster_given(arguments: argparse.Namespace) -> Cluster | None:
    """The cluster that the options of `add_cluster` name, if they name one."""
    if arguments.cluster:
        if arguments.profile:
            raise ProfileError(
                f"'{arguments.profile}' is of this machine, not of a cluster file's",
                fix="give --devices N with it",
            )
        cluster = read_cluster(arguments.cluster)
    elif arguments.devices:
        cluster = named_cluster(arguments.devices, arguments.profile)
    else:
        _check_alone(arguments)
        return None
    if arguments.memory is not None:
        if not arguments.memory:
            raise ClusterError("--memory 0", fix="give bytes above 0, as 70GB")
        cluster = with_memory(cluster, arguments.memory)
    return cluster


def _check_alone(arguments: argparse.Namespace) -> None:
    """Without devices there is nothing that more could be said of."""
    if arguments.memory is not None:
        raise ClusterError(
            "--memory is of no devices", fix="add --devices or --cluster"
        )
    if arguments.profile and not getattr(arguments, "reprice", False):
        raise ProfileError("--profile is of no devices", fix="add --devices N")


def _samples(loaded: LoadedModel, arguments: argparse.Namespace) -> int:
    """Returns a step's samples: as asked for, else those of a model's own batch."""
    if loaded.batch is not None and arguments.seq is not None:
        raise ModelError(f"'{loaded.spec}' brings its own batch", fix="leave out --seq")
    if arguments.global_batch is not None:
        samples: int = arguments.global_batch
        return samples
    if loaded.batch is None:
        raise ModelError("no --global-batch is given", fix="add --global-batch 512")
    return samples_of(loaded.batch)


def precision_notes(of: Sketch, cluster: Cluster) -> tuple[str, ...]:
    """What products compute in, or that half the bits would be faster."""
    tf32 = of.options.get("tf32", False)
    told = ("tf32",) if tf32 else ()
    chosen = of.options.get("precision")
    if chosen is not None:
        return (f"precision {chosen}", *told)
    wide = any(v.dtype == torch.float32 for v in of.named.graph.params)
    device = cluster.device.multiplying(tf32)
    ways = {"--precision bf16": "bfloat16", **({} if tf32 else {"--tf32": TF32})}
    faster = {
        way: f"{device.flops[dtype] / device.flops['float32']:.3g}"
        for way, dtype in ways.items()
        if device.flops.get(dtype, 0.0) > device.flops["float32"]
    }
    if not wide or not faster:
        return told
    texts = [f"with {way} up to {times} times as fast" for way, times in faster.items()]
    return (*told, f"the model is in float32: products are {', '.join(texts)}")


def plans_table(
    found: Found, cluster: Cluster, title: str, notes: tuple[str, ...] = ()
) -> Table:
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
    best = f"the best of {found.tried} candidates"
    priced = how_priced(found.best[0], cluster)
    return Table(title, head, tuple(rows), (best, priced, *notes))


def _data(found: Found, cluster: Cluster) -> list[dict[str, Any]]:
    """Estimates as values for JSON, the chosen one first."""
    return [
        {
            "plan": str(e.candidate),
            **estimate_data(e),
            "peak": e.peak,
            "mfu": e.utilisation(cluster),
        }
        for e in found.best
    ]
