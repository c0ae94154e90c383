"""`autopar demo`: an ordinary GPT on four processes, shown, proved and trained."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from autopar.commands.arguments import path
from autopar.commands.run_field import add_field
from autopar.compiler import compile_offline
from autopar.models.load import load_model
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.plans.store import save_plan
from autopar.progress import Progress
from autopar.reports.inspection import schedule_text, stage_table
from autopar.reports.parameters import parameter_table
from autopar.runtime.launch.launch import ROOT, launch
from autopar.terminal import command
from autopar.verify import verify

MESH, MICROBATCHES = "pp=2,tp=2", 4


class DemoError(AutoparError):
    """The demo cannot find its model."""


EXAMPLES = ("autopar demo", "autopar demo --steps 100 --dir /tmp/demo")


def add(add: Any) -> None:
    """Adds the command's arguments."""
    add.set_defaults(command=lambda a: demo(a.dir, a.steps))
    add_field(add, "steps")
    add.add_argument(
        "--dir", type=path, default=Path("autopar-demo"), help="folder for the plan"
    )


def demo(directory: Path, steps: int) -> int:
    """Compile, explain, prove and train; returns the exit status.

    directory: for the plan. Takes about a minute on two cores.
    """
    spec = demo_model()
    print(f"1. An ordinary PyTorch model: {spec}\n")
    loaded = load_model(spec)
    assert loaded.batch is not None, "the demo's factory returns a batch"
    plan = Plan(Mesh.parse(MESH), MICROBATCHES)
    with Progress("compile"):
        program = compile_offline(loaded.model, loaded.batch, plan, prove=True)
    print("2. What the compiler found in it, and decided\n")
    print(parameter_table(program), stage_table(program), sep="\n\n", end="\n\n")
    print(schedule_text(program), end="\n\n")
    where = save_plan(program, directory / "plan", spec)

    print("3. The proof: all four ranks in this process, against the untouched model\n")
    with Progress("verify"):
        result = verify(program, loaded.model, loaded.batch).check()
    name, error = result.worst
    print(f"loss {result.loss:.7f}, of the untouched model {result.reference_loss:.7f}")
    print(
        f"{len(result.errors) - 1} gradients agree; the worst is '{name}', {error:.1e}"
    )

    print("\n4. Training: four processes, beside the model on a single device\n")
    sys.stdout.flush()
    status = _train(where, steps)
    if status == 0:
        print(_what_next(directory / "plan", sorted(program.modules)[0]))
    return status


def demo_model() -> str:
    """The example's specification: installed with us, or a file of the checkout."""
    if importlib.util.find_spec("autopar.examples") is not None:
        return "autopar.examples.gpt:demo"
    file = ROOT / "examples" / "gpt.py"
    if not file.is_file():
        raise DemoError(f"neither autopar.examples nor '{file}' is there")
    return f"{file}:demo"


def _train(plan: Path, steps: int) -> int:
    """`autopar run` on four processes. Returns its exit status."""
    ranks = Mesh.parse(MESH).size
    command = ["run", str(plan), "--steps", str(steps), "--data", "stdlib"]
    needs_none = torch.cuda.device_count() < ranks
    more = {"CUDA_VISIBLE_DEVICES": ""} if needs_none else {}
    return launch(ranks, [*command, "--reference"], environment=more)


def _what_next(plan: Path, module: str) -> str:
    return f"""
5. What the ranks ran is readable Python: {plan}/modules/{module}.py

   Try next
     {command("autopar", "inspect", plan, "--rank", 3)}
     {command("autopar", "verify", plan, "--float64")}
     autopar compile hf:gpt2 --mesh pp=2,tp=2 --microbatches 4 -o gpt2-plan"""
