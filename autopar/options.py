"""The options of `compile`, and the plan that they stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

from autopar.machine.cluster_file import number
from passes.mesh import Mesh, MeshError
from passes.plan import AUTO, CONTEXT_PARALLEL, SPLIT, Plan, PlanError
from passes.price.cluster import ClusterError
from passes.program import Program
from passes.ranges import RANGES, check_range, shown

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing from Python 3.11 on


LAYOUTS = ("zigzag", "contiguous")


class Options(TypedDict, total=False):
    """What `compile` takes beside a mesh; what is left out is as a `Plan` has it.

    microbatches: parts of the batch, run one after another; the result does not change.
    schedule, stages_per_rank: of the pipeline, see `passes.schedule.make_schedule`;
    "auto" makes one for the measured seconds of the stages, within `memory`.
    sequence_parallel: split what tp leaves whole along the sequence; True if not given.
    context_parallel: how attention works on an axis cp, which splits the sequence:
    "gather": ranks gather all keys and values; "ring": these are passed round, and no
    rank ever holds all; "ulysses": ranks exchange rows for heads.
    cp_layout: the rows of a rank of cp: "zigzag", some from the front and as many from
    the back, so that a causal mask gives all ranks the same work; or "contiguous". If
    not given: zigzag, but for "ulysses", where ranks see all rows, and where a hint
    splits a parameter on cp, which zigzag leaves whole.
    recompute: "full" keeps of each layer its input alone from forward to backward,
    "selective" leaves out spelled-out attention scores; see `passes.stage.recompute`.
    "auto" chooses for each layer what takes the least time and fits into `memory`.
    memory: what a rank may use, in bytes or as "16GiB"; a plan that needs more is
    refused.
    zero: with 1, 2 or 3 each data parallel rank keeps only a share of the parameters,
    their gradients and the optimizer's state between steps; with 2 of gradients during
    a step too, with 3 of everything at any time (FSDP); see `passes.shard.rest`. On a
    mesh "dp=2,fsdp=4" ranks share along fsdp, and dp replicates the shares.
    offload: what an optimizer updates and keeps lies on the CPU; see
    `autopar.runtime.parameters.offload`.
    precision: "bf16" or "fp16" is what `with torch.autocast` would be around the model,
    its parameters staying as they are; see `passes.capture.lower_precision`.
    tf32: let GPUs multiply what is float32 by their TF32 tensor cores, with 10 bits of
    mantissa; torch's settings are put back after each step.
    backend: "inductor" runs what is between two collectives as compiled code, "eager"
    as Python; "auto", if not given: what `autopar profile MODEL` measured to be faster
    here; if it did not, on a GPU compiled, if triton is installed, on a CPU as Python.
    hints: `{"*.mlp.fc.weight": "ffn/tp"}`, see `passes.shard.hints`.
    """

    microbatches: int
    schedule: str
    stages_per_rank: int
    sequence_parallel: bool
    context_parallel: str
    cp_layout: str | None
    recompute: str
    memory: int | str
    zero: int
    offload: bool
    precision: str
    tf32: bool
    backend: str
    hints: Mapping[str, str] | None


def check_arguments(
    plan: Any, program: Any, loss_fn: Any, seed: Any, timeout: Any
) -> None:
    """Raises PlanError for what `compile` takes beside options, if it is something
    else."""
    check_range("seed", seed, PlanError)
    if not isinstance(plan, Plan | None) and plan != AUTO:
        raise PlanError(f"plan={shown(plan)}", fix='give a Plan, or "auto"')
    if not isinstance(program, Program | None):
        raise PlanError(
            f"program={shown(program)}", fix="give what compile_offline returned"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise PlanError(
            f"loss_fn={shown(loss_fn)}",
            fix="give a function: loss_fn=lambda output, batch: ...",
        )
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else None
    if seconds not in RANGES["timeout"]:
        raise PlanError(
            f"timeout={shown(timeout)}",
            fix=f"give a timedelta(seconds=...): {RANGES['timeout']}",
        )


def make_plan(mesh: Any, **options: Unpack[Options]) -> Plan:
    """The decisions that options stand for. Raises PlanError, MeshError."""
    if unknown := sorted(set(options) - set(Options.__annotations__)):
        raise PlanError(
            f"there is no option {unknown[0]!r}",
            fix=f"the options are {', '.join(Options.__annotations__)}",
        )
    decisions: dict[str, Any] = dict(options)
    for name in ("offload", "sequence_parallel", "tf32"):
        if not isinstance(decisions.get(name, True), bool):
            raise PlanError(f"{name}={shown(decisions[name])}", fix="use True or False")
    split = dict(SPLIT)
    if not decisions.pop("sequence_parallel", True):
        for axis in ("tp", "qp"):
            split[axis] = tuple(d for d in split[axis] if d != "seq")
    context_parallel = decisions.pop("context_parallel", "gather")
    if context_parallel not in tuple(CONTEXT_PARALLEL):
        raise PlanError(
            f"context_parallel={context_parallel!r}",
            fix=f"use one of {', '.join(map(repr, CONTEXT_PARALLEL))}",
        )
    split["cp"] = CONTEXT_PARALLEL[context_parallel]
    where = read_mesh(mesh)
    layout = decisions.pop("cp_layout", None)
    decisions["memory"] = read_bytes(decisions.get("memory", 0))
    decisions["hints"] = _hints(decisions.get("hints") or {})
    hinted = any(hint.endswith("/cp") for hint in decisions["hints"].values())
    by_rows = where.axis_size("cp") > 1 and context_parallel != "ulysses"
    # Of parameters a rank rests one piece: shares over cp need a layout in one piece.
    only_cp_shares = decisions.get("zero") and not any(
        where.axis_size(axis) > 1 for axis in ("dp", "fsdp", "ep")
    )
    usual = by_rows and not hinted and not only_cp_shares
    decisions["zigzag"] = _zigzag(context_parallel, layout, usual)
    return Plan(where, split=split, **decisions)


def _hints(given: Any) -> dict[str, str]:
    pairs = given.items() if isinstance(given, Mapping) else [(given, None)]
    for pattern, what in pairs:
        if not (isinstance(pattern, str) and isinstance(what, str)):
            raise PlanError(
                f"hints={shown(given)}",
                fix="write pattern and split: {'*.mlp.up.weight': 'ffn/tp'}",
            )
    return dict(given)


def _zigzag(context_parallel: str, layout: str | None, usual: bool) -> tuple[str, ...]:
    """The axes in zigzag: cp, if that is asked for, or `usual` and nothing is."""
    if layout not in (None, *LAYOUTS):
        raise PlanError(
            f"cp_layout={layout!r}", fix=f"use one of {', '.join(map(repr, LAYOUTS))}"
        )
    if context_parallel == "ulysses" and layout == "zigzag":
        raise PlanError(
            "cp_layout='zigzag' balances nothing with context_parallel='ulysses', "
            "where every rank sees all rows",
            fix="leave cp_layout out",
        )
    return ("cp",) if layout == "zigzag" or (usual and layout is None) else ()


def read_bytes(size: int | str) -> int:
    """A number of bytes, or text as `16GiB` or `800MB`. Raises PlanError."""
    if isinstance(size, str):
        try:
            found = number("memory", size)
        except ClusterError:
            found = math.nan
        if not RANGES["memory"].least <= found <= RANGES["memory"].most:
            raise PlanError(
                f"memory={shown(size)} is no size",
                fix=f"write 16GiB or 800MB: {RANGES['memory']} of bytes",
            )
        size = int(found)
    check_range("memory", size, PlanError)
    return size


def read_mesh(mesh: Any) -> Mesh:
    """A Mesh, its text, or a torch DeviceMesh with named dims in default rank order."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, str):
        return Mesh.parse(mesh)
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise MeshError(
            f"a mesh is text or a DeviceMesh with named dims, not {mesh!r}",
            fix="write 'pp=2,tp=2', or give init_device_mesh its mesh_dim_names",
        )
    ranks = mesh.mesh
    if ranks.flatten().tolist() != list(range(ranks.numel())):
        raise MeshError(
            "the DeviceMesh does not hold all ranks in ascending order",
            fix="make it by init_device_mesh over the whole world",
        )
    return Mesh(tuple(zip(names, ranks.shape, strict=True)))
