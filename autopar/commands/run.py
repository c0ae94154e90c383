"""`autopar run`: train a plan, on processes of its own or of torchrun."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from autopar.commands.arguments import add_backend, add_json, number, path, text
from autopar.planner.planned import mesh_of
from autopar.runtime.launch.join import check_launch
from autopar.runtime.launch.launch import launch
from autopar.training.run import RunOptions, run
from passes.mesh import MeshError

# Flags of numbers, each with its range, and the default of `RunOptions`.
NUMBERS = {
    "steps": "of the optimizer",
    "lr": "learning rate, of AdamW",
    "clip": "the greatest norm of all gradients; 0: as it is",
    "seed": "of the data",
    "timeout": "seconds to wait for a rank",
    "warmup": "steps until lr is reached",
    "save_every": "steps between checkpoints; 0: the last alone",
    "keep": "how many of the newest checkpoints stay",
}


def add(commands: Any) -> None:
    usual = RunOptions()
    add = commands.add_parser("run", help="train a plan, also under torchrun")
    add.set_defaults(command=run_command)
    add.add_argument("plan", type=path, help="a directory, planned or compiled")
    add.add_argument(
        "--data",
        type=text,
        default=usual.data,
        help="stdlib, synthetic, or a .bin .npy .txt file",
    )
    for name, told in NUMBERS.items():
        flag, default = f"--{name.replace('_', '-')}", getattr(usual, name)
        add.add_argument(flag, type=number(name), default=default, help=told)
    add.add_argument("--save", type=path, metavar="DIR", help="for checkpoints")
    add.add_argument(
        "--reference", action="store_true", help="train the model itself beside"
    )
    add.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint, if any"
    )
    add.add_argument(
        "--unproved", action="store_true", help="run a plan that nobody proved"
    )
    add_backend(add)
    add_json(add, "print one object for each step")


def run_command(arguments: argparse.Namespace) -> int:
    values = {**vars(arguments), "as_json": arguments.json}
    options = RunOptions(
        **{field.name: values[field.name] for field in fields(RunOptions)}
    )
    ranks = mesh_of(arguments.plan).size
    if ranks > 1 and check_launch() == (0, 1) and "RANK" not in os.environ:
        check_devices(ranks, arguments.argv)
        return launch(ranks, arguments.argv)
    return run(arguments.plan, options)


def check_devices(ranks: int, argv: Sequence[str]) -> None:
    """Raises MeshError if this machine has GPUs, but not one for each rank."""
    here = torch.cuda.device_count()
    if 0 < here < ranks:
        command = shlex.join(["-m", "autopar", *argv])
        raise MeshError(
            f"the plan is for {ranks} ranks, and this machine has {here} GPUs",
            fix=f"start on each of {math.ceil(ranks / here)} nodes: torchrun --nnodes "
            f"{math.ceil(ranks / here)} --nproc-per-node {here} --rdzv-backend c10d "
            f"--rdzv-endpoint HOST:29400 {command}; or hide the GPUs, to compute on "
            "the CPU: CUDA_VISIBLE_DEVICES=",
        )
