"""Compiling without processes: capture, price, run the passes, dump what they made.

Environment:
    AUTOPAR_DUMP=directory   write each pass's text there (01-trace.txt ...)
    AUTOPAR_CHECK=1          verify what each pass makes
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.capture.capture_model import capture_model
from autopar.gc_paused import gc_paused
from autopar.measure.stage_costs import this_machine
from autopar.own_modes import own_modes
from autopar.passes.errors import LOSS, AutoparError, LossNotSeparable
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import Cluster
from autopar.passes.program import Program
from autopar.passes.watch import Made, Watch, check
from autopar.progress import tell
from autopar.proof.prove_program import prove_program


@gc_paused()
@own_modes()
def compile_offline(
    model: nn.Module,
    batch: Mapping[str, Any],
    plan: Plan,
    loss_fn: Callable[..., Any] | None = None,
    cluster: Cluster | None = None,
    prove: bool = False,
    outputs: Sequence[str] = (),
    even: bool = True,
) -> Program:
    """Compile `model(**batch)` for a plan, in this process alone.

    batch: the full, global batch, as example of names, shapes and types. cluster: whose
    seconds decide, see `compile_program`; None: this machine's, measured once. prove:
    that the program computes what the model does, see `autopar.proof.prove_program`.
    outputs: names of what else the model returns that comes out. Scalars beside the
    loss do if microbatches can share them out; a note says which do not. even: see
    `compile_program`.
    Raises: AutoparError.
    """
    watch, devices = watch_from_environment(), cluster or this_machine
    if cluster is not None:
        cluster.check_holds(plan.mesh)
    notes: list[str] = []
    metrics: list[str] | None = None
    while True:
        traced = capture_model(model, batch, loss_fn, plan.lowering, outputs, metrics)
        try:
            program = compile_program(traced, plan, devices, watch, even)
            break
        except LossNotSeparable as error:
            names = traced.outputs[: traced.metrics]
            left = [name for name in names if name in (error.outputs or names)]
            if not left or LOSS in error.outputs:
                raise
            metrics = [name for name in names if name not in left]
            why = f"{error.message} ({error.source})"
            notes.append(f"step.metrics is without {', '.join(left)}: {why}")
    program = replace(program, remarks=(*program.remarks, *notes))
    if not prove:
        return program
    proof = prove_program(program, model, batch, traced, loss_fn)
    return replace(program, proof=proof)


@gc_paused()
@own_modes()
def proved(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
) -> Program:
    """The program with its proof, see `compile_offline`."""
    asked = program.plan.lowering, program.wanted, program.metric_names
    traced = capture_model(model, batch, loss_fn, *asked)
    proof = prove_program(program, model, batch, traced, loss_fn)
    return replace(program, proof=proof)


class Dump:
    """Writes each pass's text to a directory, numbered in the order of the passes."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory, self.count = directory, 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise AutoparError(
                f"AUTOPAR_DUMP={str(directory)!r} cannot be made: {error}",
                fix="give a directory that can be written, or: unset AUTOPAR_DUMP",
            ) from None

    def __call__(self, name: str, made: Made) -> None:
        self.count += 1
        suffix = "py" if name.startswith("emit") else "txt"
        path = self.directory / f"{self.count:02}-{name}.{suffix}"
        path.write_text(f"{made}\n")


def watch_from_environment() -> Watch:
    """Returns the observer of passes' results that the environment asks for."""
    directory = os.environ.get("AUTOPAR_DUMP")
    watches: list[Watch] = [Dump(pathlib.Path(directory))] if directory else []
    if os.environ.get("AUTOPAR_CHECK") == "1":
        watches.append(check)

    def watch(name: str, made: Made) -> None:
        tell(f"{name.partition('-')[0]} done")
        for each in watches:
            each(name, made)

    return watch
