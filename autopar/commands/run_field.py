"""Flags of the options of a run, which other commands have too."""

from __future__ import annotations

import argparse
from typing import Any

from autopar.commands.arguments import Several, number, path, text
from autopar.passes.ranges import RANGES
from autopar.training.options import RunOptions


def add_field(add: Any, name: str) -> None:
    """Adds the flag of a field of `RunOptions`."""
    each = RunOptions.__dataclass_fields__[name]
    told = dict(each.metadata)
    if name in RANGES:
        told["type"] = number(name)
    elif isinstance(each.default, bool):
        told["action"] = argparse.BooleanOptionalAction  # a file may say yes
    elif "choices" not in told:
        told["type"] = text if "str" in str(each.type) else path
    if isinstance(each.default, tuple):
        told["action"] = Several
    flag = f"--{name.replace('_', '-')}"
    add.add_argument(flag, default=each.default, **told)
