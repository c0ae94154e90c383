"""`autopar simulate`: the whole step of a plan on paper, and as a trace to look at."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autopar.commands.arguments import add_json, path
from autopar.commands.devices import add_compiled, add_devices, read_devices
from autopar.progress import Progress
from autopar.reports.simulated import simulated
from autopar.reports.simulation import run_data, run_text
from autopar.reports.trace_file import write_trace

EXAMPLES = (
    "autopar simulate plan --trace step.json",
    "autopar simulate plan --devices 8xH100",
)


def add(add: Any) -> None:
    """Adds the command's arguments."""
    add.set_defaults(command=simulate_command)
    add.add_argument("plan", type=path, help="a directory, planned or compiled")
    add.add_argument(
        "--trace", type=path, metavar="FILE", help="trace to write, for Perfetto"
    )
    add_compiled(add)
    add_devices(add, required=False)
    add_json(add)


def simulate_command(arguments: argparse.Namespace) -> int:
    """Prints the simulated timeline of a step."""
    with Progress("simulate"):
        step = simulated(arguments.plan, read_devices(arguments), arguments.compiled)
    run = step.run
    if arguments.trace:
        write_trace(run, arguments.trace)
    if arguments.json:
        print(json.dumps(run_data(run), indent=1))
        return 0
    print(step.title, run_text(run), sep="\n\n")
    if arguments.trace:
        print(f"\nwrote {arguments.trace}: open it in https://ui.perfetto.dev")
    return 0
