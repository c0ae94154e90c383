"""`autopar compile`: decisions and a model become a directory of programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from autopar.commands.cli_plan import add_labels, add_tf32, labelled
from autopar.commands.option_types import number, path, size, text, text_or_nothing
from autopar.compiler import compile_offline
from autopar.models.load import (
    LoadedModel,
    ModelError,
    example_batch,
    load_model,
)
from autopar.options import LAYOUTS, make_plan
from autopar.planner.estimate_file import Findings
from autopar.planner.planned import batch_for, read_decided
from autopar.reports.inspection import (
    report_data,
    schedule_text,
    stage_table,
)
from autopar.store import save_plan
from passes.errors import HintError
from passes.mesh import Mesh
from passes.plan import (
    AUTO,
    BACKENDS,
    CONTEXT_PARALLEL,
    PRECISION,
    RECOMPUTE,
    SPLIT,
    Plan,
    PlanError,
)
from passes.schedule.make_schedule import SCHEDULES


def add_compile(commands: Any, model_help: str) -> None:
    add = commands.add_parser("compile", help="plan a model for a mesh, offline")
    add.set_defaults(command=compile_command)
    add.add_argument("model", type=text, metavar="MODEL", help=model_help)
    add.add_argument(
        "--mesh", type=text_or_nothing, help='axes and sizes, as "pp=2,tp=2"'
    )
    add.add_argument(
        "--microbatches",
        type=number("microbatches"),
        metavar="N",
        help="else up to 4 for each stage",
    )
    add.add_argument("--schedule", default="1f1b", choices=(*SCHEDULES, AUTO))
    add.add_argument(
        "--stages-per-rank", type=number("stages_per_rank"), default=1, metavar="N"
    )
    add.add_argument(
        "--batch", type=number("batch"), metavar="N", help="samples (hf: models)"
    )
    add.add_argument(
        "--seq", type=number("seq"), metavar="N", help="tokens (hf: models)"
    )
    add.add_argument("--attention-mask", action="store_true", help="(hf: models)")
    add.add_argument("--no-sequence-parallel", action="store_true")
    add.add_argument(
        "--context-parallel", default="gather", choices=sorted(CONTEXT_PARALLEL)
    )
    add.add_argument("--cp-layout", choices=LAYOUTS, help="else as balances the work")
    add.add_argument("--recompute", default="none", choices=(*RECOMPUTE, AUTO))
    add.add_argument(
        "--memory",
        type=size,
        default="0",
        metavar="SIZE",
        help="of a rank, as 16GiB; 0: no limit",
    )
    add.add_argument(
        "--zero",
        type=number("zero"),
        default=0,
        metavar="0..3",
        help="what data ranks share out",
    )
    add.add_argument(
        "--offload", action="store_true", help="optimizer and its state on the CPU"
    )
    add.add_argument("--precision", default="model", choices=tuple(PRECISION))
    add_tf32(add, False)
    add.add_argument(
        "--backend",
        default=AUTO,
        choices=(AUTO, *BACKENDS),
        help="what runs functions: auto is what is faster on the device",
    )
    add.add_argument(
        "--hint", type=text, action="append", default=[], metavar="PATTERN=DIM/AXIS"
    )
    add.add_argument("--plan", type=path, help="a plan.json, or its directory")
    add_labels(add)
    add.add_argument(
        "--unproved",
        action="store_true",
        help="do not prove that the plan computes what the model does",
    )
    add.add_argument("--meta", action="store_true", help="make no weights")
    add.add_argument(
        "--seed", type=number("seed"), default=0, help="of weights and dropout"
    )
    add.add_argument("-o", "--output", type=path, default=Path("plan"), metavar="DIR")
    add.add_argument("--json", action="store_true")


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
    prove = not arguments.unproved
    program = compile_offline(loaded.model, batch, plan, prove=prove)
    where = save_plan(
        program, arguments.output, arguments.model, arguments.seed, findings
    )
    if arguments.json:
        print(json.dumps(report_data(program), indent=1))
        return 0
    print(stage_table(program), schedule_text(program), sep="\n\n", end="\n\n")
    for note in program.notes:
        print(f"note: {note}")
    print(program.proof or "not proved")
    print(f"wrote {where} ({len(program.modules)} distinct modules)")
    if not loaded.on_meta:
        print(
            f"next: torchrun --nproc-per-node {program.mesh.size} -m autopar run "
            f"{arguments.output}"
        )
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
        tf32=arguments.tf32,
        backend=arguments.backend,
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
