"""The command line: `autopar plan | explain | compile | inspect | verify | run ...`."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch

import autopar
from autopar.checkpoints.checkpoint_files import is_checkpoint
from autopar.checkpoints.export import export
from autopar.commands.cli_compile import add_compile
from autopar.commands.cli_explain import add_explain
from autopar.commands.cli_plan import add_plan
from autopar.commands.cli_profile import add_profile
from autopar.commands.cli_simulate import add_simulate
from autopar.commands.demo import demo
from autopar.commands.option_types import number, path, text
from autopar.compiler import compile_offline, proved
from autopar.machine.backend import resolve_backend
from autopar.machine.machine import host_memory
from autopar.machine.profile_file import read_profile
from autopar.models.batches import with_samples
from autopar.models.load import (
    load_model,
    random_batch,
)
from autopar.planner.planned import compiled
from autopar.reports.checkpoint_report import checkpoint_data, checkpoint_table
from autopar.reports.inspection import report, report_data
from autopar.reports.proof import verification_data, verification_table
from autopar.runtime.agreement.validate import check_model
from autopar.runtime.execute.emitted import listing
from autopar.runtime.execute.inductor import Kept
from autopar.store import COMPILED, StoredPlan
from autopar.training.run import RunOptions, run, vocab_of
from autopar.verify import room_needed, verify
from passes.errors import AutoparError
from passes.plan import AUTO, BACKENDS

# A process that ends has no use for the cycles that Python looks for before (a second).
atexit.register(gc.freeze)

MODEL = "file.py:factory, module:factory, hf:TYPE[?key=value,...] or hf:config.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for a failed proof, 2 for errors."""
    try:
        arguments = parser().parse_args(argv)
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


class UsageError(AutoparError):
    """A command line that argparse refuses."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line as all of our errors do."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, fix=f"see: {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="autopar", description="Parallel training of an unmodified PyTorch GPT."
    )
    top.add_argument(
        "--version", action="version", version=f"autopar {autopar.__version__}"
    )
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_plan(commands, MODEL)
    add_explain(commands)
    add_simulate(commands)
    add_profile(commands, MODEL)
    add_compile(commands, MODEL)
    _add_inspect(commands)
    _add_verify(commands)
    _add_run(commands)
    _add_export(commands)
    _add_demo(commands)
    return top


def _add_inspect(commands: Any) -> None:
    add = commands.add_parser("inspect", help="show what a plan or checkpoint is")
    add.set_defaults(command=inspect_command)
    add.add_argument("plan", type=path, help="or the directory of a checkpoint")
    add.add_argument(
        "--rank", type=number("rank"), help="print the module that a rank runs"
    )
    add.add_argument(
        "--stage", type=number("stage"), help="print the modules of a stage"
    )
    add.add_argument("--all", action="store_true", help="one row for each parameter")
    add.add_argument("--json", action="store_true")


def _add_verify(commands: Any) -> None:
    add = commands.add_parser("verify", help="prove a plan against its model")
    add.set_defaults(command=verify_command)
    add.add_argument("plan", type=path)
    add.add_argument(
        "--float64",
        action="store_true",
        help="compile the plan again in double precision",
    )
    add.add_argument(
        "--as-given",
        action="store_true",
        help="with the model's own weights and batch; else with drawn ones",
    )
    _add_backend(add)
    add.add_argument("--all", action="store_true", help="one row for each parameter")
    add.add_argument("--json", action="store_true")


def _add_backend(add: Any) -> None:
    add.add_argument(
        "--backend",
        choices=(AUTO, *BACKENDS),
        help="what runs functions; else as the plan has it",
    )


def _add_run(commands: Any) -> None:
    usual = RunOptions()
    add = commands.add_parser("run", help="train a plan, under torchrun")
    add.set_defaults(command=run_command)
    add.add_argument("plan", type=path)
    add.add_argument("--steps", type=number("steps"), default=usual.steps)
    add.add_argument(
        "--data",
        type=text,
        default=usual.data,
        help="stdlib, synthetic, or a .bin .npy .txt file",
    )
    add.add_argument("--lr", type=number("lr"), default=usual.lr)
    add.add_argument(
        "--clip", type=number("clip"), default=usual.clip, help="0: do not clip"
    )
    add.add_argument(
        "--seed", type=number("seed"), default=usual.seed, help="of the data"
    )
    add.add_argument(
        "--reference", action="store_true", help="train the model itself beside"
    )
    add.add_argument(
        "--timeout",
        type=number("timeout"),
        default=usual.timeout,
        help="seconds to wait for a rank",
    )
    add.add_argument(
        "--warmup",
        type=number("warmup"),
        default=usual.warmup,
        help="steps until lr is reached",
    )
    add.add_argument("--save", type=path, metavar="DIR", help="write checkpoints")
    add.add_argument(
        "--save-every",
        type=number("save_every"),
        default=usual.save_every,
        metavar="STEPS",
    )
    add.add_argument(
        "--keep", type=number("keep"), default=usual.keep, help="newest checkpoints"
    )
    add.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint, if any"
    )
    add.add_argument(
        "--unproved", action="store_true", help="run a plan that nobody proved"
    )
    _add_backend(add)
    add.add_argument("--json", action="store_true", help="one object for each step")


def _add_export(commands: Any) -> None:
    add = commands.add_parser("export", help="a checkpoint's weights as one file")
    add.set_defaults(command=export_command)
    add.add_argument("checkpoint", type=path, help="one, or a directory: the newest")
    add.add_argument(
        "-o", "--output", type=path, required=True, metavar="FILE.pt|FILE.safetensors"
    )


def _add_demo(commands: Any) -> None:
    add = commands.add_parser("demo", help="a GPT on 4 processes, proved and trained")
    add.set_defaults(command=lambda a: demo(a.dir, a.steps))
    add.add_argument("--steps", type=number("steps"), default=20)
    add.add_argument("--dir", type=path, default=Path("autopar-demo"))


# --- commands ----------------------------------------------------------------------


def inspect_command(arguments: argparse.Namespace) -> int:
    if is_checkpoint(arguments.plan):
        if arguments.json:
            print(json.dumps(checkpoint_data(arguments.plan), indent=1))
        else:
            print(checkpoint_table(arguments.plan))
        return 0
    stored = _load(arguments.plan)
    if arguments.rank is not None or arguments.stage is not None:
        text = listing(stored.program, arguments.rank, arguments.stage)
        print(json.dumps({"text": text}) if arguments.json else text)
    elif arguments.json:
        print(json.dumps(report_data(stored.program), indent=1))
    else:
        print(f"{stored.model_spec}\n\n{report(stored.program, arguments.all)}")
    return 0


def verify_command(arguments: argparse.Namespace) -> int:
    stored = _load(arguments.plan)
    loaded = load_model(stored.model_spec, seed=stored.seed)
    program, model = stored.program, loaded.model
    check_model(program, model)
    vocab = loaded.vocab or vocab_of(program)
    if loaded.batch is not None:
        batch: Mapping = with_samples(loaded.batch, program.batch_extent)
    else:
        batch = random_batch(program.inputs, vocab, stored.seed)
    if loaded.on_meta or room_needed(program) > host_memory():
        # The model does not run here: it and the plan are made small.
        proof = proved(program, model, batch).proof
        assert proof is not None, "what is not proved is an error"
        print(json.dumps(proof.to_data(), indent=1) if arguments.json else proof)
        return 0
    if arguments.float64:
        if program.plan.dtype:
            print(
                f"note: autocast leaves float64 alone, and so does precision "
                f"'{program.plan.precision}': this proves the plan, not its casts",
                file=sys.stderr,
            )
        model = model.double()
        program = compile_offline(model, batch, program.plan)
    drawn = not arguments.as_given
    asked = arguments.backend or program.plan.backend
    measured = read_profile().backends
    backend, note = resolve_backend(asked, torch.device("cpu"), measured)
    if note:
        print(f"note: {note}", file=sys.stderr)
    compiled = Kept(stored.directory / COMPILED) if backend == "inductor" else None
    result = verify(
        *(program, model, batch),
        seed=stored.seed,
        drawn=drawn,
        compiled=compiled,
    )
    if arguments.json:
        print(json.dumps(verification_data(result), indent=1))
    else:
        print(verification_table(result, arguments.all))
    return 0 if result.passed else 1


def run_command(arguments: argparse.Namespace) -> int:
    values = {**vars(arguments), "as_json": arguments.json}
    options = RunOptions(
        **{field.name: values[field.name] for field in fields(RunOptions)}
    )
    return run(arguments.plan, options)


def export_command(arguments: argparse.Namespace) -> int:
    folder, count = export(arguments.checkpoint, arguments.output)
    print(f"wrote {count} tensors of {folder} to {arguments.output}")
    return 0


def _load(directory: Path) -> StoredPlan:
    stored = compiled(directory)
    for warning in stored.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return stored
