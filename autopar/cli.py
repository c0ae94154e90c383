"""The command line: `autopar plan | explain | compile | inspect | verify | run ...`."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

import autopar
from autopar.batches import with_samples
from autopar.checkpoints.checkpoint_files import is_checkpoint
from autopar.checkpoints.export import export
from autopar.commands.cli_explain import add_explain
from autopar.commands.cli_plan import add_labels, add_plan, labelled
from autopar.commands.cli_profile import add_profile
from autopar.commands.cli_simulate import add_simulate
from autopar.commands.demo import demo
from autopar.compiler import compile_offline
from autopar.machine.machine import host_memory
from autopar.models import (
    LoadedModel,
    ModelError,
    example_batch,
    load_model,
    random_batch,
)
from autopar.options import LAYOUTS, make_plan
from autopar.planner.estimate_file import Findings
from autopar.planner.planned import batch_for, compiled, read_decided
from autopar.reports.checkpoint_report import checkpoint_data, checkpoint_table
from autopar.reports.inspection import report, report_data, schedule_text, stage_table
from autopar.reports.proof import verification_data, verification_table
from autopar.runtime.emitted import listing
from autopar.store import StoredPlan, save_plan
from autopar.training.run import RunOptions, run, vocab_of
from autopar.verify import check_room, verify
from passes.errors import AutoparError, HintError
from passes.mesh import Mesh
from passes.plan import (
    AUTO,
    CONTEXT_PARALLEL,
    PRECISION,
    RECOMPUTE,
    SPLIT,
    ZERO,
    Plan,
    PlanError,
)
from passes.schedule.make_schedule import SCHEDULES

# A process that ends has no use for the cycles that Python looks for before (a second).
atexit.register(gc.freeze)

MODEL = "file.py:factory, module:factory, hf:TYPE[?key=value,...] or hf:config.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for a failed proof, 2 for errors."""
    arguments = parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `autopar inspect plan | head`
        sys.stderr.close()
        return 0
    return status


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
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
    _add_compile(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_run(commands)
    _add_export(commands)
    _add_demo(commands)
    return top


def _add_compile(commands: Any) -> None:
    add = commands.add_parser("compile", help="plan a model for a mesh, offline")
    add.set_defaults(command=compile_command)
    add.add_argument("model", metavar="MODEL", help=MODEL)
    add.add_argument("--mesh", help='axes and sizes, as "pp=2,tp=2"')
    add.add_argument(
        "--microbatches", type=int, metavar="N", help="else up to 4 for each stage"
    )
    add.add_argument("--schedule", default="1f1b", choices=(*SCHEDULES, AUTO))
    add.add_argument("--stages-per-rank", type=int, default=1, metavar="N")
    add.add_argument("--batch", type=int, metavar="N", help="samples (hf: models)")
    add.add_argument("--seq", type=int, metavar="N", help="tokens (hf: models)")
    add.add_argument("--attention-mask", action="store_true", help="(hf: models)")
    add.add_argument("--no-sequence-parallel", action="store_true")
    add.add_argument(
        "--context-parallel", default="gather", choices=sorted(CONTEXT_PARALLEL)
    )
    add.add_argument("--cp-layout", choices=LAYOUTS, help="else as balances the work")
    add.add_argument("--recompute", default="none", choices=(*RECOMPUTE, AUTO))
    add.add_argument(
        "--memory", default="0", metavar="SIZE", help="of a rank, as 16GiB; 0: no limit"
    )
    add.add_argument(
        "--zero", type=int, default=0, choices=ZERO, help="what data ranks share out"
    )
    add.add_argument(
        "--offload", action="store_true", help="optimizer and its state on the CPU"
    )
    add.add_argument("--precision", default="model", choices=tuple(PRECISION))
    add.add_argument("--hint", action="append", default=[], metavar="PATTERN=DIM/AXIS")
    add.add_argument("--plan", type=Path, help="a plan.json, or its directory")
    add_labels(add)
    add.add_argument("--meta", action="store_true", help="make no weights")
    add.add_argument("--seed", type=int, default=0, help="of weights and dropout")
    add.add_argument("-o", "--output", type=Path, default=Path("plan"), metavar="DIR")
    add.add_argument("--json", action="store_true")


def _add_inspect(commands: Any) -> None:
    add = commands.add_parser("inspect", help="show what a plan or checkpoint is")
    add.set_defaults(command=inspect_command)
    add.add_argument("plan", type=Path, help="or the directory of a checkpoint")
    add.add_argument("--rank", type=int, help="print the module that a rank runs")
    add.add_argument("--stage", type=int, help="print the modules of a stage")
    add.add_argument("--all", action="store_true", help="one row for each parameter")
    add.add_argument("--json", action="store_true")


def _add_verify(commands: Any) -> None:
    add = commands.add_parser("verify", help="prove a plan against its model")
    add.set_defaults(command=verify_command)
    add.add_argument("plan", type=Path)
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
    add.add_argument("--all", action="store_true", help="one row for each parameter")
    add.add_argument("--json", action="store_true")


def _add_run(commands: Any) -> None:
    usual = RunOptions()
    add = commands.add_parser("run", help="train a plan, under torchrun")
    add.set_defaults(command=run_command)
    add.add_argument("plan", type=Path)
    add.add_argument("--steps", type=int, default=usual.steps)
    add.add_argument(
        "--data", default=usual.data, help="stdlib, synthetic, or a .bin .npy .txt file"
    )
    add.add_argument("--lr", type=float, default=usual.lr)
    add.add_argument("--clip", type=float, default=usual.clip, help="0: do not clip")
    add.add_argument("--seed", type=int, default=usual.seed, help="of the data")
    add.add_argument(
        "--reference", action="store_true", help="train the model itself beside"
    )
    add.add_argument(
        "--timeout",
        type=float,
        default=usual.timeout,
        help="seconds to wait for a rank",
    )
    add.add_argument(
        "--warmup", type=int, default=usual.warmup, help="steps until lr is reached"
    )
    add.add_argument("--save", type=Path, metavar="DIR", help="write checkpoints")
    add.add_argument(
        "--save-every", type=int, default=usual.save_every, metavar="STEPS"
    )
    add.add_argument("--keep", type=int, default=usual.keep, help="newest checkpoints")
    add.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint, if any"
    )
    add.add_argument("--json", action="store_true", help="one object for each step")


def _add_export(commands: Any) -> None:
    add = commands.add_parser("export", help="a checkpoint's weights as one file")
    add.set_defaults(command=export_command)
    add.add_argument("checkpoint", type=Path, help="one, or a directory: the newest")
    add.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.pt|FILE.safetensors"
    )


def _add_demo(commands: Any) -> None:
    add = commands.add_parser("demo", help="a GPT on 4 processes, proved and trained")
    add.set_defaults(command=lambda a: demo(a.dir, a.steps))
    add.add_argument("--steps", type=int, default=20)
    add.add_argument("--dir", type=Path, default=Path("autopar-demo"))


# --- commands ----------------------------------------------------------------------


def compile_command(arguments: argparse.Namespace) -> int:
    plan, findings = _plan(arguments)
    loaded = load_model(
        arguments.model, seed=arguments.seed, device="meta" if arguments.meta else None
    )
    if findings and not (arguments.batch or arguments.seq or arguments.attention_mask):
        batch: Mapping = batch_for(loaded, findings.samples, findings.seq)
    else:
        batch = _compile_batch(loaded, arguments, plan.mesh)
    if arguments.plan is None and arguments.microbatches is None:
        plan = replace(plan, microbatches=_microbatches(batch, plan.mesh))
    plan = labelled(plan, loaded, batch, arguments)
    program = compile_offline(loaded.model, batch, plan)
    where = save_plan(
        program, arguments.output, arguments.model, arguments.seed, findings
    )
    if arguments.json:
        print(json.dumps(report_data(program), indent=1))
        return 0
    print(stage_table(program), schedule_text(program), sep="\n\n", end="\n\n")
    for note in program.notes:
        print(f"note: {note}")
    print(f"wrote {where} ({len(program.modules)} distinct modules)")
    if not loaded.on_meta:
        print(f"next: autopar verify {arguments.output}")
    return 0


def _plan(arguments: argparse.Namespace) -> tuple[Plan, Findings | None]:
    """The decisions; and what the search found that made them, if it did."""
    if arguments.plan is not None:
        if arguments.mesh is not None:
            raise PlanError(
                "--plan and --mesh contradict each other",
                fix="edit the mesh in the plan, or leave out --plan",
            )
        decided = read_decided(arguments.plan)
        findings = decided.findings
        same = findings is not None and findings.model == arguments.model
        return decided.plan, findings if same else None
    if arguments.mesh is None:
        raise PlanError("no mesh is given", fix="add --mesh pp=2,tp=2, or --plan FILE")
    plan = make_plan(
        arguments.mesh,
        microbatches=1 if arguments.microbatches is None else arguments.microbatches,
        schedule=arguments.schedule,
        stages_per_rank=arguments.stages_per_rank,
        sequence_parallel=not arguments.no_sequence_parallel,
        context_parallel=arguments.context_parallel,
        cp_layout=arguments.cp_layout,
        recompute=arguments.recompute,
        memory=arguments.memory,
        zero=arguments.zero,
        offload=arguments.offload,
        precision=arguments.precision,
        hints=dict(map(_hint, arguments.hint)),
    )
    return plan, None


def _hint(text: str) -> tuple[str, str]:
    pattern, equals, what = text.partition("=")
    if not (pattern and equals and what):
        raise HintError(
            f"'{text}' is not a hint",
            fix="write --hint 'blocks.*.mlp.up.weight=ffn/tp'",
        )
    return pattern, what


def _microbatches(batch: Mapping, mesh: Mesh) -> int:
    """Unless told otherwise: up to four for each pipeline stage, as the batch divides.

    The bubble of p stages is then at most (p-1)/(5p-1) of a step.
    """
    stages, ranks = mesh.axis_size("pp"), _data_ranks(mesh)
    extents = [len(x) for x in batch.values() if isinstance(x, Tensor) and x.ndim]
    samples = max(extents, key=extents.count, default=1)  # most fields have samples
    fitting = [m for m in range(1, 4 * stages + 1) if samples % (m * ranks) == 0]
    return max(fitting, default=1) if stages > 1 else 1


def _data_ranks(mesh: Mesh) -> int:
    """The ranks that the batch is split over."""
    return prod(size for axis, size in mesh.axes if "batch" in SPLIT.get(axis, ()))


def _compile_batch(
    loaded: LoadedModel, arguments: argparse.Namespace, mesh: Mesh
) -> Mapping:
    """The factory's batch, or one of the sizes that were asked for."""
    if loaded.batch is not None:
        if arguments.batch or arguments.seq or arguments.attention_mask:
            raise ModelError(
                f"'{loaded.spec}' brings its own batch",
                fix="leave out --batch, --seq and --attention-mask",
            )
        return loaded.batch
    if loaded.vocab is None:
        raise ModelError(
            f"'{loaded.spec}' brings no batch to compile for",
            fix="let the factory return (model, batch)",
        )
    return example_batch(
        loaded.vocab,
        arguments.batch or max(8, 4 * mesh.axis_size("pp") * _data_ranks(mesh)),
        arguments.seq or 128,
        arguments.attention_mask,
    )


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
    if loaded.on_meta:
        raise ModelError(
            f"'{loaded.spec}' is too big to run here for a comparison",
            fix="compile and verify it with fewer layers: they are all alike",
        )
    program, model = stored.program, loaded.model
    check_room(program, host_memory())
    vocab = loaded.vocab or vocab_of(program)
    if loaded.batch is not None:
        batch: Mapping = with_samples(loaded.batch, program.batch_extent)
    else:
        batch = random_batch(program.inputs, vocab, stored.seed)
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
    result = verify(program, model, batch, seed=stored.seed, drawn=drawn)
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
