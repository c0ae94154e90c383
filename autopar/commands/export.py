"""`autopar export`: a checkpoint's weights as one file."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autopar.checkpoints.export import export
from autopar.commands.arguments import EMA, add_json, add_switch, path
from autopar.progress import Progress

EXAMPLES = (
    "autopar export trained -o model.safetensors",
    "autopar export trained --ema -o model.pt",
)


def add(add: Any) -> None:
    """Adds the command's arguments."""
    add.set_defaults(command=export_command)
    add.add_argument("checkpoint", type=path, help="one, or a directory: the newest")
    add.add_argument(
        "-o",
        "--output",
        type=path,
        required=True,
        metavar="FILE.pt|FILE.safetensors",
        help="file to write",
    )
    add_switch(add, "--ema", EMA)
    add_json(add, "print what was written as JSON")


def export_command(arguments: argparse.Namespace) -> int:
    """Writes a checkpoint's weights into one file."""
    with Progress("export"):
        folder, count = export(arguments.checkpoint, arguments.output, arguments.ema)
    if arguments.json:
        made = {
            "checkpoint": str(folder),
            "output": str(arguments.output),
            "tensors": count,
        }
        print(json.dumps(made, indent=1))
    else:
        print(f"wrote {count} tensors of {folder} to {arguments.output}")
    return 0
