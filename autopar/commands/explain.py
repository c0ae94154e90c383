"""`autopar explain`: what `autopar plan -o` wrote, told in parts."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autopar.commands.arguments import add_json, add_switch, path
from autopar.commands.devices import add_devices, read_devices
from autopar.planner.planned import read_decided
from autopar.planner.reprice import as_priced, formulas, reprice
from autopar.plans.plan_record import read_record
from autopar.progress import Progress
from autopar.reports.explain import explanation, explanation_data
from autopar.reports.op_sharding_table import op_sharding_table
from autopar.reports.tables import Table

EXAMPLES = ("autopar explain plan", "autopar explain plan --devices 8xH100 --formulas")


def add(add: Any) -> None:
    """Adds the command's arguments."""
    add.set_defaults(command=explain_command)
    add.add_argument("plan", type=path, help="what `autopar plan -o` wrote")
    add_switch(add, "--reprice", "capture the model and price the plan again")
    add_switch(add, "--formulas", "show the formulas of the numbers")
    add_devices(add, required=False)
    add_json(add)


def explain_command(arguments: argparse.Namespace) -> int:
    """Prints the tables behind a planned choice, repriced where asked."""
    record = read_record(arguments.plan)
    cluster = read_devices(arguments)
    with Progress("explain"):
        if cluster or arguments.reprice:
            record = reprice(
                record, cluster or as_priced(record.cluster, arguments.profile)
            )
        spelled = formulas(record) if arguments.formulas else {}
    if arguments.json:
        data = {**explanation_data(record), "formulas": spelled}
        print(json.dumps(data, indent=1))
        return 0
    print(explanation(record))
    if record.best[0].candidate.has_op_shardings:
        print(f"\n{op_sharding_table(read_decided(arguments.plan).plan)}")
    if spelled:
        print(
            f"\n{Table('in named dims', ('what', 'formula'), tuple(spelled.items()))}"
        )
    return 0
