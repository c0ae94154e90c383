"""`autopar profile`: measure this machine, and show what was measured."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar.commands.arguments import (
    add_json,
    add_model,
    add_seed,
    add_switch,
    number,
    numbers,
    path,
)
from autopar.machine.machine import busy, machine_text
from autopar.machine.profile_file import (
    ProfileError,
    profile_data,
    read_profile,
    save_profile,
)
from autopar.models.load import load_model
from autopar.passes.ranges import Range
from autopar.planner.choose import SAMPLES
from autopar.planner.profile import Workload, measure_here
from autopar.progress import Progress
from autopar.reports.measured import profile_report
from autopar.runtime.launch.join import choose_backend
from autopar.runtime.launch.launch import launch, rank_threads
from autopar.runtime.launch.nodes import check_launch

WAIT = timedelta(minutes=5)  # of a rank for another one, that captures a model
LIMIT = 900.0  # seconds of all ranks of a number
HERE = Range(1, 1024)  # processes of a machine


EXAMPLES = (
    "autopar profile --ranks 2,4",
    "autopar profile examples/gpt.py:demo --ranks 4",
)


def add(add: Any) -> None:
    """Adds the command's arguments."""
    usual = Workload()
    add.set_defaults(command=profile_command)
    add_model(add, nargs="?")
    add.add_argument(
        "--ranks",
        type=numbers(HERE),
        metavar="N,M",
        help="numbers of processes that plans will have; under torchrun: its own",
    )
    add.add_argument(
        "--seq",
        type=number("seq"),
        default=usual.seq,
        metavar="N",
        help="tokens of a sample, for hf: models",
    )
    add.add_argument(
        "--samples",
        type=number("samples"),
        default=SAMPLES,
        metavar="N",
        help="largest number of samples in a microbatch",
    )
    add_seed(add, "weights")
    add.add_argument(
        "--seconds",
        type=number("seconds"),
        default=usual.seconds,
        help="time for measuring messages, roughly",
    )
    add.add_argument(
        "-o",
        "--output",
        type=path,
        metavar="FILE",
        help="file of the profile (default: in the cache)",
    )
    add_switch(add, "--show", "print what is known, and measure nothing")
    add_json(add)


def profile_command(arguments: argparse.Namespace) -> int:
    """Measures this machine, saves the profile and prints it."""
    if not arguments.show:
        if "RANK" in os.environ:
            return _as_rank(arguments)
        launched = launches(arguments)
        if arguments.model:  # what is wrong with it is told here, not by ranks
            load_model(arguments.model, seed=arguments.seed, device="meta")
        for ranks, model in launched:
            if ranks == 1:
                torch.set_num_threads(rank_threads())
                load = replace(_workload(arguments), model=model)
                with Progress("profile"):
                    save_profile(measure_here(load, _tell), arguments.output)
            elif status := _launch(ranks, _command(arguments, model)):
                return status
    profile = read_profile(arguments.output)
    if arguments.json:
        print(
            json.dumps({"machine": machine_text(), **profile_data(profile)}, indent=1)
        )
    else:
        print(profile_report(profile))
    return 0


def launches(arguments: argparse.Namespace) -> list[tuple[int, str]]:
    """(ranks, model): messages are measured by all; ops by those of which as many
    compute at once, by the most of them, which split layers in the most ways."""
    if not arguments.ranks:
        raise ProfileError(
            "there are no processes to measure: no --ranks",
            fix="say how many a plan will have: --ranks 2,4",
        )
    counts = sorted(set(arguments.ranks))
    most = {busy(n): n for n in counts}
    model = arguments.model or ""
    return [(n, model if n in most.values() else "") for n in counts]


def _launch(ranks: int, command: Sequence[str]) -> int:
    try:
        return launch(ranks, command, LIMIT)
    except subprocess.TimeoutExpired:
        raise ProfileError(
            f"{ranks} ranks did not measure in {LIMIT:.0f} s, and were ended",
            fix="ask for less: a smaller model, --seq or --samples",
        ) from None


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def _command(arguments: argparse.Namespace, model: str) -> list[str]:
    passed = ["seq", "samples", "seed", "seconds"]
    command = ["profile", *([model] if model else [])]
    command += [f"--{name}={getattr(arguments, name)}" for name in passed]
    if arguments.output:
        command += ["-o", str(arguments.output.absolute())]
    return command


def _workload(arguments: argparse.Namespace) -> Workload:
    return Workload(
        arguments.model or "",
        arguments.seed,
        arguments.seq,
        arguments.samples,
        arguments.seconds,
    )


def _as_rank(arguments: argparse.Namespace) -> int:
    """Measure with the other ranks of torchrun; the first one writes."""
    check_launch()
    dist.init_process_group(choose_backend(), timeout=WAIT)
    first = dist.get_rank() == 0
    with Progress("profile") if first else nullcontext():
        told = _tell if first else lambda line: None
        profile = measure_here(_workload(arguments), told)
    if first:
        _tell(f"wrote {save_profile(profile, arguments.output)}")
    dist.barrier()
    dist.destroy_process_group()
    return 0
