"""The command line: `autopar plan | explain | compile | inspect | verify | run ...`."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module

from autopar.commands.parser import Parser
from autopar.gc_paused import gc_paused
from autopar.passes.errors import AutoparError
from autopar.progress import Progress, tell
from autopar.terminal import styled
from autopar.version import VERSION

# Each is a module of `autopar.commands`, which is imported when the command is named.
COMMANDS = {
    "plan": "find the best plan for some devices",
    "explain": "where a plan's seconds and bytes go",
    "simulate": "a plan's step, event by event",
    "report": "a plan as one HTML page to look at",
    "profile": "measure this machine's ops and links",
    "compile": "plan a model for a mesh, offline",
    "inspect": "show what a plan or checkpoint is",
    "verify": "prove a plan against its model",
    "run": "train a plan or a model",
    "sample": "let a checkpoint of a run write text",
    "export": "a checkpoint's weights as one file",
    "demo": "a GPT on 4 processes, proved and trained",
}
EXAMPLES = (
    "autopar plan hf:gpt2 --devices 8xA100-80GB --global-batch 64 --seq 1024 -o plan",
    "autopar run examples/gpt.py:demo --devices 4 --data stdlib --steps 100",
)


def program() -> None:
    """Runs a command as the process that was started for it, which ends with it.

    Exit handlers run first, the one that is registered here last. Then the process is
    gone, without Python's search for cycles (a second) and without freeing all that it
    imported (a fifth of one).
    """
    ended: list[int] = []
    atexit.register(_leave, ended)
    ended.append(main())
    sys.exit(ended[0])


def _leave(ended: Sequence[int]) -> None:
    """ended: with the status, unless an error ended the command."""
    gc.freeze()
    if ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for a failed proof, 2 for errors."""
    try:
        arguments = parser().parse_args(argv)
        arguments.argv = [*(sys.argv[1:] if argv is None else argv)]
        status: int = arguments.command(arguments)
    except AutoparError as error:
        print(f"{_named()} {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `autopar inspect plan | head`
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno is None:  # raised by hand, and not the system's
            raise
        file = f"'{error.filename}': " if error.filename is not None else ""
        print(
            f"{_named()} {file}{error.strerror or error}\n"
            "  fix  see that the path is right and can be written, on a disk with room",
            file=sys.stderr,
        )
        return 2
    return status


def _named() -> str:
    """The name of the program, as errors begin with it."""
    return styled("autopar:", "red", sys.stderr)


def parser() -> Parser:
    """Builds the parser; a command's arguments are declared when it is named."""
    top = Parser(
        prog="autopar", description="Parallel training of an unmodified PyTorch GPT."
    )
    top.add_argument("--version", action="version", version=f"autopar {VERSION}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, told in COMMANDS.items():
        commands.add_parser(
            name, help=told, description=told, fill=partial(_fill, name)
        )
    top.give_examples(EXAMPLES)
    return top


def _fill(name: str, command: Parser) -> Sequence[str]:
    """Add the arguments of a command. Returns examples."""
    first = os.environ.get("RANK", "0") == "0"  # of torchrun's ranks one tells
    with gc_paused(), Progress(name) if first else nullcontext():
        tell("importing torch")
        module = import_module(f"autopar.commands.{name}")
    module.add(command)
    examples: Sequence[str] = module.EXAMPLES
    return examples


if __name__ == "__main__":
    program()
