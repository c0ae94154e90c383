"""The options of `compile`, and the plan that they stand for.

`Options` says each once: `compile` takes them as keywords, `commands.arguments` offers
them as flags, `planner.request` reads what a search may decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, get_type_hints

import torch

from autopar.machine.cluster_file import number
from autopar.passes.mesh import CONTEXT_AXES, TENSOR_AXES, Mesh, MeshError, usual_split
from autopar.passes.plan import (
    AUTO,
    BACKENDS,
    CONTEXT_PARALLEL,
    PRECISION,
    RECOMPUTE,
    Plan,
    PlanError,
)
from autopar.passes.price.cluster import ClusterError
from autopar.passes.program import Program
from autopar.passes.ranges import RANGES, check_choice, check_range, shown
from autopar.passes.schedule.make_schedule import SCHEDULES

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing from Python 3.11 on

LAYOUTS = ("zigzag", "contiguous")
# A planner searches for an option, holds it for all plans, or refuses it.
SEARCHED, OF_ALL, UNPRICED = "searched", "of all", "unpriced"


@dataclass(frozen=True)
class Option:
    """A keyword of `compile` and a flag of the command line.

    planner: SEARCHED, OF_ALL or UNPRICED. usual: its default, where a `Plan` has no
    field of that name. follows: whether its default follows from other options.
    default: its name in the help, where that is not the value. auto: what "auto" does,
    if it is a choice too.
    """

    help: str
    planner: str
    choices: tuple[str, ...] = ()
    auto: str = ""
    usual: Any = None
    follows: bool = False
    default: str = ""
    metavar: str | None = None


class Options(TypedDict, total=False):
    """The options of `compile` beside a mesh; those left out are as a `Plan` has them.

    See `passes.schedule.make_schedule`, `passes.recompute`, `passes.shard.hints`,
    `passes.shard.parameter_sharding` (ZeRO), `passes.capture.lower_precision` and
    `autopar.runtime.parameters.offload`.
    """

    microbatches: Annotated[
        int,
        Option(
            "parts of the batch, run one after another; the result is the same",
            SEARCHED,
            metavar="N",
        ),
    ]
    schedule: Annotated[
        str,
        Option(
            "schedule of the pipeline",
            SEARCHED,
            tuple(SCHEDULES),
            auto="makes one for the measured seconds of the stages, within --memory",
        ),
    ]
    stages_per_rank: Annotated[
        int, Option("pipeline stages of each rank", SEARCHED, metavar="N")
    ]
    sequence_parallel: Annotated[
        bool,
        Option(
            "split activations along the sequence where tp leaves them whole",
            OF_ALL,
            usual=True,
        ),
    ]
    context_parallel: Annotated[
        str,
        Option(
            "how ranks attend on an axis cp, which splits the sequence: gather all "
            "keys and values; pass them round a ring, so that no rank ever holds all; "
            "or (ulysses) exchange rows for heads",
            SEARCHED,
            tuple(CONTEXT_PARALLEL),
            usual="gather",
        ),
    ]
    cp_layout: Annotated[
        str | None,
        Option(
            "the rows of a rank of cp: zigzag, some from the front and as many from "
            "the back, so that a causal mask gives all ranks the same work; or "
            "contiguous",
            UNPRICED,
            LAYOUTS,
            default="zigzag; contiguous with ulysses, or if a hint splits a dim on cp",
        ),
    ]
    recompute: Annotated[
        str,
        Option(
            "what the backward computes again: elementwise, results of ops like silu "
            "or a cast; selective, also attention scores and what ranks gather of each "
            "other; full, all of a layer but its input",
            SEARCHED,
            RECOMPUTE,
            auto="chooses for each layer what is fastest and fits into --memory",
            follows=True,
            default="elementwise with --backend inductor, or auto on a GPU; else none",
        ),
    ]
    loss_chunks: Annotated[
        int,
        Option(
            "compute the logits and the loss of some positions after those of others, "
            "in so many chunks, and again in the backward: so never are all logits "
            "there, of which large vocabularies and long sequences have many",
            OF_ALL,
            metavar="N",
        ),
    ]
    memory: Annotated[
        int | str,
        Option(
            "memory of a device that a plan may use, as 16GiB",
            OF_ALL,
            default="0, no limit",
            metavar="SIZE",
        ),
    ]
    zero: Annotated[
        int,
        Option(
            "ZeRO stage: from 1 on, each data parallel rank keeps between steps only a "
            "shard of parameters, gradients and the optimizer's state; from 2 on of "
            "gradients within a step too; with 3 (FSDP) of parameters too. On a mesh "
            "dp=2,fsdp=4 fsdp shards and dp replicates",
            SEARCHED,
            metavar="0..3",
        ),
    ]
    offload: Annotated[
        bool,
        Option(
            "keep the optimizer's state and the weights that it updates on the CPU",
            UNPRICED,
        ),
    ]
    precision: Annotated[
        str,
        Option(
            "bf16 and fp16 compute as within torch.autocast, bf16-stream as a model "
            "with parameters in bf16; trained parameters keep their own dtype",
            OF_ALL,
            tuple(PRECISION),
        ),
    ]
    tf32: Annotated[
        bool,
        Option(
            "multiply float32 on a GPU's TF32 tensor cores, with 10 bits of mantissa; "
            "torch's own settings are put back after each step",
            OF_ALL,
        ),
    ]
    backend: Annotated[
        str,
        Option(
            "eager runs functions as Python, inductor compiles what lies between two "
            "collectives",
            OF_ALL,
            BACKENDS,
            auto="takes the one that `autopar profile MODEL` measured to be faster "
            "here, else inductor on a GPU with triton, else eager",
        ),
    ]
    hints: Annotated[
        Mapping[str, str] | None,
        Option(
            "split a parameter, as '*.mlp.fc.weight=ffn/tp'; may be repeated",
            UNPRICED,
            metavar="PATTERN=DIM/AXIS",
        ),
    ]


OPTIONS: Mapping[str, Option] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Options, include_extras=True).items()
}
_PLAN = {f.name: f.default for f in fields(Plan) if f.default is not MISSING}


def usual(name: str) -> Any:
    """The value of an option that is left out; None: it follows from others."""
    option = OPTIONS[name]
    return None if option.follows else _PLAN.get(name, option.usual)


def options_of(planner: str) -> tuple[str, ...]:
    """The options with which a planner does this."""
    return tuple(name for name, one in OPTIONS.items() if one.planner == planner)


def check_arguments(
    plan: Any, program: Any, loss_fn: Any, seed: Any, timeout: Any
) -> None:
    """Raises PlanError for wrong arguments of `compile` beside options."""
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
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise PlanError(
            f"there is no option {unknown[0]!r}",
            fix=f"the options are {', '.join(OPTIONS)}",
        )
    decisions: dict[str, Any] = dict(options)
    if decisions.get("recompute") is None:
        decisions["recompute"] = usual_recompute(decisions.get("backend", AUTO))
    for name in decisions:
        if isinstance(usual(name), bool) and not isinstance(decisions[name], bool):
            raise PlanError(f"{name}={shown(decisions[name])}", fix="use True or False")
    split = usual_split()
    if not decisions.pop("sequence_parallel", usual("sequence_parallel")):
        for axis in TENSOR_AXES:
            split[axis] = tuple(d for d in split[axis] if d != "seq")
    context_parallel = decisions.pop("context_parallel", usual("context_parallel"))
    check_choice("context_parallel", context_parallel, CONTEXT_PARALLEL, PlanError)
    split |= dict.fromkeys(CONTEXT_AXES, CONTEXT_PARALLEL[context_parallel])
    where = read_mesh(mesh)
    layout = decisions.pop("cp_layout", None)
    decisions["memory"] = read_bytes(decisions.get("memory", 0))
    decisions["hints"] = _hints(decisions.get("hints") or {})
    ends = tuple(f"/{axis}" for axis in CONTEXT_AXES)
    hinted = any(hint.endswith(ends) for hint in decisions["hints"].values())
    by_rows = where.context_ranks > 1 and context_parallel != "ulysses"
    balances = by_rows and not hinted
    decisions["zigzag"] = _zigzag(context_parallel, layout, balances)
    return Plan(where, split=split, **decisions)


def usual_recompute(backend: str) -> str:
    """The default policy: recomputing what compiled functions have in registers."""
    compiled = backend == "inductor" or (backend == AUTO and torch.cuda.is_available())
    return "elementwise" if compiled else "none"


def _hints(hints: Any) -> dict[str, str]:
    pairs = hints.items() if isinstance(hints, Mapping) else [(hints, None)]
    for pattern, split in pairs:
        if not (isinstance(pattern, str) and isinstance(split, str)):
            raise PlanError(
                f"hints={shown(hints)}",
                fix="write pattern and split: {'*.mlp.up.weight': 'ffn/tp'}",
            )
    return dict(hints)


def _zigzag(
    context_parallel: str, layout: str | None, balances: bool
) -> tuple[str, ...]:
    """The axes in zigzag: cp, if asked for, or if it `balances` and nothing is."""
    check_choice("cp_layout", layout, (None, *LAYOUTS), PlanError)
    if context_parallel == "ulysses" and layout == "zigzag":
        raise PlanError(
            "cp_layout='zigzag' balances nothing with context_parallel='ulysses', "
            "where every rank sees all rows",
            fix="leave cp_layout out",
        )
    is_zigzag = layout == "zigzag" or (balances and layout is None)
    return CONTEXT_AXES if is_zigzag else ()


def read_bytes(size: int | str) -> int:
    """A number of bytes, or text as `16GiB` or `800MB`. Raises PlanError."""
    if isinstance(size, str):
        try:
            count = number("memory", size)
        except ClusterError:
            count = math.nan
        if not RANGES["memory"].least <= count <= RANGES["memory"].most:
            raise PlanError(
                f"memory={shown(size)} is no size",
                fix=f"write 16GiB or 800MB: {RANGES['memory']} of bytes",
            )
        size = int(count)
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
