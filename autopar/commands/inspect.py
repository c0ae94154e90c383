"""`autopar inspect`: show what a plan or a checkpoint is."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autopar.checkpoints.checkpoint_files import is_checkpoint
from autopar.commands.arguments import add_json, add_switch, number, path
from autopar.commands.stored import load_stored
from autopar.reports.checkpoint_report import checkpoint_data, checkpoint_table
from autopar.reports.inspection import report, report_data
from autopar.runtime.execute.emitted import listing

EXAMPLES = ("autopar inspect plan", "autopar inspect plan --rank 3")


def add(add: Any) -> None:
    """Adds the command's arguments."""
    add.set_defaults(command=inspect_command)
    add.add_argument("plan", type=path, help="directory of a plan or a checkpoint")
    add.add_argument(
        "--rank", type=number("rank"), help="print the module that a rank runs"
    )
    add.add_argument(
        "--stage", type=number("stage"), help="print the modules of a stage"
    )
    add_switch(add, "--all", "one row for each parameter")
    add_json(add)


def inspect_command(arguments: argparse.Namespace) -> int:
    """Prints a plan, the modules of a rank or stage, or a checkpoint's contents."""
    if is_checkpoint(arguments.plan):
        if arguments.json:
            print(json.dumps(checkpoint_data(arguments.plan), indent=1))
        else:
            print(checkpoint_table(arguments.plan))
        return 0
    stored = load_stored(arguments.plan)
    if arguments.rank is not None or arguments.stage is not None:
        text = listing(stored.program, arguments.rank, arguments.stage)
        print(json.dumps({"text": text}) if arguments.json else text)
    elif arguments.json:
        print(json.dumps(report_data(stored.program, stored.cluster), indent=1))
    else:
        text = report(stored.program, arguments.all, stored.cluster)
        print(f"{stored.model_spec}\n\n{text}")
    return 0
