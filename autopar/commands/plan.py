"""`autopar plan`: find the best plan for some devices."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from autopar.commands.arguments import (
    SEARCH,
    SEQ,
    add_batch_sizes,
    add_json,
    add_model,
    add_options,
    add_seed,
    add_switch,
    path,
    text,
)
from autopar.commands.devices import add_devices, read_devices
from autopar.gc_paused import gc_paused
from autopar.models.batches import samples_of
from autopar.models.load import LoadedModel, ModelError, load_model
from autopar.options import OF_ALL, SEARCHED, options_of
from autopar.passes.mesh import Mesh
from autopar.passes.plan import PlanError
from autopar.passes.price.cluster import Cluster
from autopar.passes.search.candidates import ALIKE
from autopar.passes.search.search import Ranking
from autopar.planner.best_plan import best_plan, capture_few_layers
from autopar.planner.planned import other_devices, save_record
from autopar.planner.request import PlanRequest, read_shape
from autopar.plans.plan_record import estimate_data
from autopar.progress import Progress
from autopar.reports.op_sharding_table import op_sharding_table
from autopar.reports.plans import layers_notes, plans_table, precision_notes
from autopar.terminal import command

# Options of the planner; --memory stands with the devices.
DECISIONS = (
    *options_of(SEARCHED),
    *(name for name in options_of(OF_ALL) if name != "memory"),
)


EXAMPLES = (
    "autopar plan hf:gpt2 --devices 8xA100-80GB --global-batch 64 --seq 1024",
    "autopar plan examples/gpt.py:demo --devices 4 --mesh tp=2 -o plan",
)


def add(add: Any) -> None:
    """Adds the command's arguments."""
    add.set_defaults(command=plan_command)
    add_model(add)
    add_devices(add, required=True)
    add_batch_sizes(add, usual="those of the model's own batch")
    add_decisions(add)
    add.add_argument(
        "--op-shardings",
        "--labels",
        action=argparse.BooleanOptionalAction,
        help="choose for each op what an axis splits, in all of the best plans or in "
        "none (default: in those that it could make the fastest)",
    )
    add_seed(add, "weights and dropout")
    add.add_argument(
        "-o", "--output", type=path, metavar="DIR", help="folder for the best plan"
    )
    add_switch(
        add,
        "--compile",
        "also compile and prove the best plan in DIR, as `autopar compile MODEL "
        "--plan DIR -o DIR` does",
    )
    add_json(add)


def add_decisions(add: Any, names: Sequence[str] = DECISIONS) -> None:
    """Adds flags for what a search may decide. names: of `DECISIONS`."""
    add.add_argument(
        "--mesh",
        type=text,
        help='axes that are decided already, as "tp=2"; or sizes alone, as "4,2"',
    )
    searched = options_of(SEARCHED)
    add_options(add, names, {name: SEARCH * (name in searched) for name in names})


def read_request(arguments: argparse.Namespace, cluster: Cluster) -> PlanRequest:
    """The request for a plan: the devices, and the decisions that flags make."""
    values = {name: getattr(arguments, name) for name in DECISIONS}
    options = {name: value for name, value in values.items() if value is not None}
    # What has names is of our axes here, or a slip of the pen.
    named = "=" in (arguments.mesh or "")
    shape = () if named else read_shape(arguments.mesh or "")
    mesh = Mesh.parse(arguments.mesh) if arguments.mesh and not shape else None
    return PlanRequest(cluster, mesh, shape, options)


@gc_paused()
def plan_command(arguments: argparse.Namespace) -> int:
    """Searches for the fastest plans, prints them and writes the best. Raises
    ModelError if a model without a batch gets no --global-batch."""
    began = time.perf_counter()
    cluster = read_devices(arguments)
    assert cluster is not None, "the parser asks for one"
    request = read_request(arguments, cluster)
    reach = {None: ALIKE, True: math.inf, False: -1.0}[arguments.op_shardings]
    if arguments.compile and not arguments.output:
        raise PlanError("--compile has nowhere to write", fix="add -o plan")
    with Progress("plan"):
        loaded = load_model(arguments.model, seed=arguments.seed, device="meta")
        seq, global_batch = arguments.seq or SEQ, read_global_batch(loaded, arguments)
        if global_batch is None:
            raise ModelError("no --global-batch is given", fix="add --global-batch 512")
        of = capture_few_layers(loaded, request, global_batch, seq)
        best = best_plan(of, loaded, request, global_batch, seq, arguments.seed, reach)
    of, plans, plan = best.of, best.plans, best.plan
    if arguments.output:
        save_record(best.record, plan, arguments.output)
    proof = None
    if arguments.compile:
        # Slow to import, and most plans are compiled later.
        from autopar.planner.compile_planned import compile_there

        proof = compile_there(arguments.output, cluster=other_devices(cluster)).proof
    if arguments.json:
        print(json.dumps(_data(plans, cluster), indent=1))
        return 0
    title = f"{arguments.model} on {cluster}"
    notes = layers_notes(of, cluster), precision_notes(of, cluster, best.narrow)
    print(plans_table(plans, cluster, title, sum(notes, ())))
    if plan.op_shardings:
        print(f"\n{op_sharding_table(plan)}")
    if proof:
        print(f"\n{proof}")
    print(f"\n{time.perf_counter() - began:.1f} s", end="")
    if arguments.output:
        print(f"; wrote {arguments.output}")
        model, folder = arguments.model, arguments.output
        print(f"next: {command('autopar', 'explain', folder)}")
        print(f"      {command('autopar', 'report', folder)}")
        compile = command("autopar", "compile", model, "--plan", folder, "-o", folder)
        run = command("autopar", "run", folder)
        print(f"      {run if arguments.compile else compile}")
    else:
        print("; -o plan writes the first")
    return 0


def read_global_batch(loaded: LoadedModel, arguments: argparse.Namespace) -> int | None:
    """A step's samples, as asked for, else of the model's own batch; None: neither."""
    if loaded.batch is not None and arguments.seq is not None:
        raise ModelError(f"'{loaded.spec}' brings its own batch", fix="leave out --seq")
    if arguments.global_batch is not None:
        asked: int = arguments.global_batch
        return asked
    return None if loaded.batch is None else samples_of(loaded.batch)


def _data(plans: Ranking, cluster: Cluster) -> list[dict[str, Any]]:
    """Estimates as values for JSON, the chosen one first."""
    return [
        {
            "plan": str(e.candidate),
            **estimate_data(e),
            "peak": e.peak,
            "mfu": e.utilisation(cluster),
        }
        for e in plans.best
    ]
