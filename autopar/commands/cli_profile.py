"""`autopar profile`: measure this machine, and show what was measured."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar.commands.option_types import number, numbers, path, text
from autopar.machine.machine import busy, machine_text
from autopar.machine.profile_file import (
    Profile,
    ProfileError,
    profile_data,
    read_profile,
    save_profile,
)
from autopar.models.load import load_model
from autopar.planner.choose import SAMPLES
from autopar.profiler.profile import Workload, measure_here
from autopar.reports.tables import Table, seconds, size
from autopar.runtime.launch.join import check_launch, choose_backend
from autopar.runtime.launch.launch import launch, rank_threads
from passes.price.measured import Timed, kind_of
from passes.ranges import Range

WAIT = timedelta(minutes=5)  # of a rank for another one, that captures a model
LIMIT = 900.0  # seconds of all ranks of a number
HERE = Range(1, 1024)  # processes of a machine
SHOWN = 12  # kinds of ops in a table; JSON has all


def add_profile(commands: Any, model_help: str) -> None:
    usual = Workload()
    add = commands.add_parser("profile", help="measure this machine's ops and links")
    add.set_defaults(command=profile_command)
    add.add_argument("model", type=text, nargs="?", metavar="MODEL", help=model_help)
    add.add_argument(
        "--ranks",
        type=numbers(HERE),
        metavar="N,M",
        help="processes that plans will have; under torchrun: as many as run",
    )
    add.add_argument(
        "--seq", type=number("seq"), default=usual.seq, metavar="N", help="tokens"
    )
    add.add_argument(
        "--samples",
        type=number("samples"),
        default=SAMPLES,
        metavar="N",
        help="the most in a microbatch",
    )
    add.add_argument("--seed", type=number("seed"), default=0, help="of weights")
    add.add_argument(
        "--seconds",
        type=number("seconds"),
        default=usual.seconds,
        help="for messages, roughly",
    )
    add.add_argument("-o", "--output", type=path, metavar="FILE", help="else the cache")
    add.add_argument("--show", action="store_true", help="what was measured before")
    add.add_argument("--json", action="store_true")


def profile_command(arguments: argparse.Namespace) -> int:
    if not arguments.show:
        if "RANK" in os.environ:
            return _as_rank(arguments)
        found = launches(arguments)
        if arguments.model:  # what is wrong with it is told here, not by ranks
            load_model(arguments.model, seed=arguments.seed, device="meta")
        for ranks, model in found:
            if ranks == 1:
                torch.set_num_threads(rank_threads())
                load = replace(_workload(arguments), model=model)
                save_profile(measure_here(load, _tell), arguments.output)
            elif status := _launch(ranks, _command(arguments, model)):
                return status
    profile = read_profile(arguments.output)
    if arguments.json:
        print(
            json.dumps({"machine": machine_text(), **profile_data(profile)}, indent=1)
        )
    else:
        print(report(profile))
    return 0


def launches(arguments: argparse.Namespace) -> list[tuple[int, str]]:
    """(ranks, model): messages are measured by all; ops by those of which as many
    compute at once, by the most of them, which split layers in the most ways."""
    if not arguments.ranks:
        raise ProfileError(
            "there are no processes to measure: no --ranks",
            fix="say how many a plan will have: --ranks 2,4",
        )
    found = sorted(set(arguments.ranks))
    most = {busy(n): n for n in found}
    model = arguments.model or ""
    return [(n, model if n in most.values() else "") for n in found]


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
    given = ["seq", "samples", "seed", "seconds"]
    command = ["profile", *([model] if model else [])]
    command += [f"--{name}={getattr(arguments, name)}" for name in given]
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
    found = measure_here(_workload(arguments), _tell if first else lambda line: None)
    if first:
        _tell(f"wrote {save_profile(found, arguments.output)}")
    dist.barrier()
    dist.destroy_process_group()
    return 0


# --- what was measured, for people ---------------------------------------------------


def report(profile: Profile) -> str:
    tables = [_ops_table(at_once, profile) for at_once in sorted(profile.ops)]
    tables += [_messages_table(ranks, profile) for ranks in sorted(profile.messages)]
    if profile.backends:
        tables.append(_backends_table(profile))
    if not tables:
        return f"nothing was measured on this machine: {machine_text()}"
    return "\n\n".join([machine_text(), *map(str, tables)])


def _backends_table(profile: Profile) -> Table:
    rows = tuple(
        (device, seconds(eager), seconds(inductor), f"{eager / inductor:.2f}")
        for device, (eager, inductor) in sorted(profile.backends.items())
    )
    told = "by which --backend auto chooses"
    head = ("device", "eager", "inductor", "ratio")
    return Table("a few layers, forward and backward", head, rows, (told,))


def _ops_table(at_once: int, profile: Profile) -> Table:
    """Ops by kind, those with the most sizes first."""
    ops = profile.ops[at_once]
    kinds: dict[str, list[Timed]] = defaultdict(list)
    for key, timed in ops.timed.items():
        kinds[kind_of(key)].append(timed)
    ordered = sorted(kinds.items(), key=lambda item: -max(t.seconds for t in item[1]))
    rows = []
    for op, found in ordered[:SHOWN]:
        quickest, slowest = (f(t.seconds for t in found) for f in (min, max))
        speed = max(t.flops / t.seconds for t in found if t.seconds) / 1e9
        moved = max(t.bytes / t.seconds for t in found if t.seconds) / 1e9
        rows.append((op, len(found), seconds(quickest), seconds(slowest), speed, moved))
    notes = [f"{len(ops.timed)} ops of {len(kinds)} kinds, as emitted"]
    if ops.update:
        told = ", ".join(f"{size(b)} {seconds(s)}" for b, s in ops.update)
        notes.append(f"the optimizer's step, by a parameter's bytes: {told}")
    return Table(
        f"ops, {at_once} at a time",
        ("op", "sizes", "least", "most", "GFLOP/s", "GB/s"),
        tuple(rows),
        tuple(notes),
    )


def _messages_table(ranks: int, profile: Profile) -> Table:
    points = profile.messages[ranks].points
    sizes = sorted({bytes for row in points.values() for bytes, _ in row})
    rows = []
    for (kind, group, stride), row in sorted(points.items(), key=_order):
        took = {bytes: seconds(s) for bytes, s in row}
        rows.append((kind, f"{group}", f"{stride}", *(took.get(b, "") for b in sizes)))
    return Table(
        f"messages between {ranks} ranks, all groups at once",
        ("message", "ranks", "apart", *map(size, sizes)),
        tuple(rows),
    )


def _order(item: tuple[tuple[str, int, int], Sequence[Any]]) -> tuple[int, int, str]:
    (kind, group, stride), _ = item
    return group, stride, kind
