"""`autopar export`: a checkpoint's weights as one file."""

from __future__ import annotations

import argparse
from typing import Any

from autopar.checkpoints.export import export
from autopar.commands.arguments import path

EXAMPLES = (
    "autopar export trained -o model.safetensors",
    "autopar export trained --ema -o model.pt",
)


def add(add: Any) -> None:
    add.set_defaults(command=export_command)
    add.add_argument("checkpoint", type=path, help="one, or a directory: the newest")
    add.add_argument(
        "-o",
        "--output",
        type=path,
        required=True,
        metavar="FILE.pt|FILE.safetensors",
        help="what is written",
    )
    add.add_argument(
        "--ema", action="store_true", help="the averages of weights that --ema made"
    )


def export_command(arguments: argparse.Namespace) -> int:
    folder, count = export(arguments.checkpoint, arguments.output, arguments.ema)
    print(f"wrote {count} tensors of {folder} to {arguments.output}")
    return 0
