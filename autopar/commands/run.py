"""`autopar run`: train a plan, or a model that is planned first, on processes of its
own or of torchrun."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from autopar.commands.arguments import MODEL, add_backend, add_json, path, text
from autopar.commands.config_file import add_config, config_text, helps_of, with_config
from autopar.commands.parser import UsageError
from autopar.commands.run_field import add_field
from autopar.commands.run_model import ModelToRun, add_planning, check_decided, is_model
from autopar.commands.run_nodes import add_nodes, launch_node, wants_nodes
from autopar.passes.mesh import MeshError
from autopar.planner.planned import mesh_of
from autopar.runtime.launch.launch import launch
from autopar.runtime.launch.nodes import check_launch, torchrun_for
from autopar.terminal import command
from autopar.training.data.sources import check_named
from autopar.training.data.token_batches import weighted
from autopar.training.options import RunOptions
from autopar.training.run import run

EXAMPLES = (
    "autopar run plan --data stdlib --steps 100 --save trained",
    "autopar run hf:gpt2 --devices 4 --seq 256 --data corpus.txt",
)


def add(add: Any) -> None:
    """Adds the command's arguments."""
    add.set_defaults(command=run_command)
    add.add_argument(
        "plan",
        nargs="?",
        type=text,
        metavar="PLAN|MODEL",
        help=f"a directory, planned or compiled; or {MODEL}",
    )
    for each in fields(RunOptions):
        if each.metadata:
            add_field(add, each.name)
    add_backend(add)
    add_json(add, "print one object for each step")
    add_planning(add)
    add_nodes(add)
    add_config(add)
    add.set_defaults(parser=add)


def run_command(arguments: argparse.Namespace) -> int:
    """Trains: launches ranks, or is one of them under torchrun."""
    parser, argv = arguments.parser, arguments.argv
    helps = helps_of(parser)
    arguments = with_config(parser, arguments, argv[argv.index("run") + 1 :])
    if arguments.print_config:
        print(config_text(parser, arguments, helps), end="")
        return 0
    if arguments.plan is None:
        raise UsageError(
            "there is no plan and no model to run",
            fix=f"give one: {parser.prog} PLAN|MODEL, or plan = in the --config file",
        )
    values = {
        field.name: getattr(arguments, field.name) for field in fields(RunOptions)
    }
    options = RunOptions(**values)
    named = (*options.data, *options.eval_data)
    check_named(weighted(spec)[0] for spec in named)  # before all the rest
    alone = check_launch() == (0, 1) and "RANK" not in os.environ
    if alone and wants_nodes(arguments):
        return launch_node(arguments, argv, options)
    if is_model(arguments.plan):
        model = ModelToRun(arguments, options.seed, not options.unproved)
        if not alone:
            return run(model.prepare, options)
        plan = model.prepare()
        argv = ["run", str(plan), *flags_of(options)]
    else:
        check_decided(arguments)
        plan = path(arguments.plan)
    ranks = mesh_of(plan).size
    if ranks > 1 and alone:
        check_devices(ranks, arguments.argv)
        return launch(ranks, argv)
    return run(plan, options)


def flags_of(options: RunOptions) -> list[str]:
    """The command line of options, without those that are as usual."""
    flags = []
    for each in fields(RunOptions):
        value, flag = getattr(options, each.name), f"--{each.name.replace('_', '-')}"
        if value == each.default:
            continue
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            several = value if isinstance(value, tuple) else (value,)
            flags += [f"{flag}={one}" for one in several]
    return flags


def check_devices(ranks: int, argv: Sequence[str]) -> None:
    """Raises MeshError if this machine has GPUs, but not one for each rank."""
    here = torch.cuda.device_count()
    if 0 < here < ranks:
        again = command("-m", "autopar", *argv)
        raise MeshError(
            f"the plan is for {ranks} ranks, and this machine has {here} GPUs",
            fix=f"start on each node: {torchrun_for(ranks, here)} {again}; or hide "
            "the GPUs, to compute on the CPU: CUDA_VISIBLE_DEVICES=",
        )
