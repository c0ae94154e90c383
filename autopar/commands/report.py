"""`autopar report`: a plan as one HTML page, or two plans to compare."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from autopar.commands.arguments import add_json, add_switch, path
from autopar.commands.devices import add_compiled, add_devices, read_devices
from autopar.passes.errors import AutoparError
from autopar.progress import Progress
from autopar.reports.html.gather import Wanted, plan_data
from autopar.reports.html.page import write_page
from autopar.units import size

EXAMPLES = ("autopar report plan -o plan.html", "autopar report plan other-plan")


def add(add: Any) -> None:
    """Adds the command's arguments."""
    add.set_defaults(command=report_command)
    add.add_argument(
        "plan", type=path, nargs="+", help="a directory, planned, compiled or run in"
    )
    add.add_argument(
        *("-o", "--output"),
        type=path,
        metavar="FILE",
        help="page to write (default: PLAN.html)",
    )
    add.add_argument(
        "--log",
        type=path,
        action="append",
        default=[],
        metavar="FILE",
        help="log of `autopar run`, beside those in the plan's directory",
    )
    add_switch(add, "--formulas", "show formulas, for which the model is captured")
    add_compiled(add)
    add_devices(add, required=False)
    add_json(add, "print the page's data as JSON, and write no page")


def report_command(arguments: argparse.Namespace) -> int:
    """Writes the HTML page of one plan, or of two side by side."""
    if len(arguments.plan) > 2:
        raise AutoparError(
            f"a report of {len(arguments.plan)} plans",
            fix="give one, or two to compare: autopar report A B",
        )
    if arguments.log and len(arguments.plan) > 1:
        raise AutoparError(
            "--log is of one plan, but two are given",
            fix="put each log into its plan's directory, as *.jsonl",
        )
    wanted = Wanted(
        read_devices(arguments), arguments.compiled, arguments.formulas, arguments.log
    )
    with Progress("report"):
        plans = [plan_data(folder, wanted) for folder in arguments.plan]
    if arguments.json:
        print(json.dumps(plans, indent=1))
        return 0
    first: Path = arguments.plan[0].resolve()
    target: Path = arguments.output or Path(f"{first.name}.html")
    write_page(plans, target)
    print(f"wrote {target} ({size(target.stat().st_size)}): open it in a browser")
    return 0
