"""The command line: `autopar plan | explain | compile | inspect | verify | run ...`."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence

from autopar.commands import (
    compile,
    demo,
    explain,
    export,
    inspect,
    plan,
    profile,
    report,
    run,
    sample,
    simulate,
    verify,
)
from autopar.commands.arguments import Parser
from autopar.passes.errors import AutoparError
from autopar.version import VERSION

COMMANDS = (
    *(plan, explain, simulate, report, profile, compile, inspect, verify, run, sample),
    *(export, demo),
)
# A process that ends has no use for the cycles that Python looks for before (a second).
atexit.register(gc.freeze)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for a failed proof, 2 for errors."""
    try:
        arguments = parser().parse_args(argv)
        arguments.argv = [*(sys.argv[1:] if argv is None else argv)]
        status: int = arguments.command(arguments)
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `autopar inspect plan | head`
        sys.stderr.close()
        return 0
    except OSError as error:
        what = f"'{error.filename}': " if error.filename is not None else ""
        print(
            f"autopar: {what}{error.strerror or error}\n"
            "  fix  see that the path is right and can be written, on a disk with room",
            file=sys.stderr,
        )
        return 2
    return status


def parser() -> Parser:
    top = Parser(
        prog="autopar", description="Parallel training of an unmodified PyTorch GPT."
    )
    top.add_argument("--version", action="version", version=f"autopar {VERSION}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return top
