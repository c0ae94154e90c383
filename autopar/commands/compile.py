"""`autopar compile`: decisions and a model become a directory of programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.commands.arguments import (
    SEQ,
    add_batch_sizes,
    add_json,
    add_model,
    add_options,
    add_seed,
    add_switch,
    path,
    text,
    text_or_nothing,
)
from autopar.commands.run_field import add_field
from autopar.compiler import compile_offline
from autopar.machine.cluster_file import read_cluster
from autopar.machine.measured_cluster import named_cluster
from autopar.models.batches import samples_of
from autopar.models.load import LoadedModel, ModelError, example_batch, load_model
from autopar.options import OPTIONS, make_plan
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan, PlanError
from autopar.passes.price.cluster import Cluster
from autopar.passes.program import Program
from autopar.planner.planned import batch_for, other_devices, read_decided
from autopar.planner.planner import capture_short, open_ops
from autopar.plans.plan_record import PlanRecord
from autopar.plans.store import save_plan
from autopar.progress import Progress
from autopar.reports.inspection import report_data, schedule_text, stage_table
from autopar.terminal import command, wrap

EXAMPLES = (
    "autopar compile examples/gpt.py:demo --mesh pp=2,tp=2 --microbatches 4 -o plan",
    "autopar compile hf:gpt2 --plan plan -o compiled",
)


def add(add: Any) -> None:
    """Adds the command's arguments."""
    add.set_defaults(command=compile_command)
    add_model(add)
    add.add_argument(
        "--mesh", type=text_or_nothing, help='axes and their sizes, as "pp=2,tp=2"'
    )
    add_options(add, OPTIONS, {"microbatches": "up to 4 for each stage"})
    usual = "for hf: models 4 for each stage and data parallel rank, at least 8"
    add_batch_sizes(add, usual, "--batch")
    add_switch(add, "--attention-mask", "give hf: models an attention mask")
    add.add_argument(
        "--plan",
        type=path,
        help="a plan.json, or its directory, in place of --mesh and options",
    )
    add.add_argument(
        "--devices",
        type=text,
        metavar="NxNAME|FILE",
        help="devices whose prices cut stages, as 64xH100 or a cluster file (default: "
        "those that the plan was made for, or this machine as it is measured)",
    )
    add.add_argument(
        "--op-shardings",
        "--labels",
        type=text,
        metavar="NxNAME|FILE",
        help="choose for each op what an axis splits, by the prices of these devices",
    )
    add_field(add, "unproved")
    add_switch(add, "--meta", "load the model without its weights")
    add_seed(add, "weights and dropout")
    add.add_argument(
        *("-o", "--output"), type=path, default=Path("plan"), metavar="DIR",
        help="folder for the programs",
    )  # fmt: skip
    add_json(add)


def compile_command(arguments: argparse.Namespace) -> int:
    """Compiles, saves the plan and prints its stages and schedule."""
    with Progress("compile"):
        program, record, others, on_meta = _compile(arguments)
        where = save_plan(
            program, arguments.output, arguments.model, arguments.seed, record, others
        )
    if arguments.json:
        print(json.dumps(report_data(program, others), indent=1))
        return 0
    drawn = schedule_text(program, others)
    print(stage_table(program), drawn, sep="\n\n", end="\n\n")
    for note in program.remarks:
        print(wrap(f"note: {note}"))
    print(program.proof or "not proved")
    print(f"wrote {where} (distinct modules: {len(program.modules)})")
    if not on_meta:
        print(f"next: {command('autopar', 'run', arguments.output)}")
    return 0


def _compile(
    arguments: argparse.Namespace,
) -> tuple[Program, PlanRecord | None, Cluster | None, bool]:
    """The program; what a search found; other devices whose prices are taken; whether
    the model has no weights."""
    plan, record = _plan(arguments)
    others = _other_devices(arguments.devices, record)
    decided_for = _cluster(arguments.op_shardings) if arguments.op_shardings else None
    loaded = load_model(
        arguments.model, seed=arguments.seed, device="meta" if arguments.meta else None
    )
    if record and not (
        arguments.global_batch or arguments.seq or arguments.attention_mask
    ):
        batch: Mapping = batch_for(loaded, record.global_batch, record.seq)
    else:
        batch = _compile_batch(loaded, arguments, plan.mesh)
    if arguments.plan is None and arguments.microbatches is None:
        plan = replace(plan, microbatches=_microbatches(batch, plan.mesh))
    if decided_for is not None:
        of = capture_short(loaded.model, batch)
        plan = open_ops(of, plan, decided_for).choose().plan
    prove = not arguments.unproved
    program = compile_offline(loaded.model, batch, plan, cluster=others, prove=prove)
    return program, record, others, loaded.on_meta


def _plan(arguments: argparse.Namespace) -> tuple[Plan, PlanRecord | None]:
    """The plan; and the record of the search that made it, if one did."""
    if arguments.plan is not None:
        if arguments.mesh is not None:
            raise PlanError(
                "--plan and --mesh contradict each other",
                fix="edit the mesh in the plan, or leave out --plan",
            )
        decided = read_decided(arguments.plan)
        record = decided.record
        same = record is not None and record.model == arguments.model
        return decided.plan, record if same else None
    if arguments.mesh is None:
        raise PlanError("no mesh is given", fix="add --mesh pp=2,tp=2, or --plan FILE")
    values = {name: getattr(arguments, name) for name in OPTIONS}
    values["hints"] = dict(values["hints"])
    values["microbatches"] = values["microbatches"] or 1
    return make_plan(arguments.mesh, **values), None


def _cluster(devices: str) -> Cluster:
    if Path(devices).suffix in (".toml", ".json"):
        return read_cluster(Path(devices))
    return named_cluster(devices)


def _other_devices(devices: str | None, record: PlanRecord | None) -> Cluster | None:
    """The cluster whose prices cut stages; None: this machine, which is measured."""
    cluster = _cluster(devices) if devices else record.cluster if record else None
    return other_devices(cluster) if cluster else None


def _microbatches(batch: Mapping, mesh: Mesh) -> int:
    """The usual number: up to four for each pipeline stage, as the batch divides.

    The bubble of p stages is then at most (p-1)/(5p-1) of a step.
    """
    stages, ranks = mesh.pipeline_ranks, mesh.sample_ranks
    samples = samples_of(batch)
    fitting = [m for m in range(1, 4 * stages + 1) if samples % (m * ranks) == 0]
    return max(fitting, default=1) if stages > 1 else 1


def _compile_batch(
    loaded: LoadedModel, arguments: argparse.Namespace, mesh: Mesh
) -> Mapping:
    """The factory's batch, or one of the sizes that were asked for."""
    if loaded.batch is not None:
        if arguments.global_batch or arguments.seq or arguments.attention_mask:
            raise ModelError(
                f"'{loaded.spec}' brings its own batch",
                fix="leave out --global-batch, --seq and --attention-mask",
            )
        return loaded.batch
    if loaded.vocab is None:
        raise ModelError(
            f"'{loaded.spec}' brings no batch to compile for",
            fix="let the factory return (model, batch)",
        )
    if loaded.packed and arguments.attention_mask:
        raise ModelError(
            f"'{loaded.spec}' looks for packed documents where there is no mask",
            fix="leave out --attention-mask, or packed=true",
        )
    return example_batch(
        loaded.vocab,
        arguments.global_batch or max(8, 4 * mesh.pipeline_ranks * mesh.sample_ranks),
        arguments.seq or SEQ,
        arguments.attention_mask,
        loaded.packed,
    )
