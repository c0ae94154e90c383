"""The plan: every decision that turns a model into programs, as readable data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch

from .capture.mixed_precision import Lowering, Stream, low_dtype
from .checkpointed import is_checkpoint
from .cost import Seconds
from .decode import decode, parse_json
from .errors import AutoparError
from .mesh import AXES, PIPELINE, TIME, Mesh, usual_split
from .ranges import check_choice, check_range, shown
from .recompute.recompute import POLICIES
from .schedule.fit_schedule import Limits, fit_schedule
from .schedule.footprint import Footprint
from .schedule.make_schedule import (
    SCHEDULES,
    USUAL_SCHEDULE,
    make_schedule,
    place_stages,
)
from .schedule.order import read_order
from .schedule.schedule import Schedule, add_communication

FORMAT = 1
AGAIN = "compile it again with this version of autopar"
WRITTEN = "give a plan.json that autopar plan or compile wrote"
USUAL = "mend it, or leave it out, and it is as usual"
MESH = 'write "mesh": "pp=2,tp=2"'

# What cp splits. Rows that gather keys and values (Llama 3, Grattafiori 2024); rows
# that keys and values are passed round to (Liu 2023, see `passes.shard.ring`); or
# DeepSpeed-Ulysses (Jacobs 2023): attention by heads, with all-to-alls around it.
CONTEXT_PARALLEL = {
    "gather": ("seq",),
    "ring": ("ring:seq", "seq"),
    "ulysses": ("attention:heads", "attention:kv_heads", "attention:q_per_kv", "seq"),
}

# What the backward may compute again instead of keeping it: see
# `passes.recompute`.
RECOMPUTE = tuple(POLICIES)

# What a compiler decides: of a schedule, by measured costs; of recomputation, for each
# layer; both within the plan's memory.
AUTO = "auto"

# What runs the functions of an emitted module: Python as it is written, or code that
# Inductor makes of them, see `autopar.runtime.execute.inductor`; "auto": what is faster
# on the device at hand.
BACKENDS = ("eager", "inductor")

# What is computed in, while parameters and their gradients stay as they are. "model":
# what the model has; "bf16" and "fp16": products, as under torch.autocast, see
# `passes.capture.lower_precision`; "bf16-stream": everything, as if parameters were
# bfloat16, see `passes.capture.mixed_precision`.
NARROW = "bf16-stream"
PRECISION: dict[str, Lowering] = {
    "model": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    NARROW: Stream(torch.bfloat16),
}


WEIGHTS = "weights"  # in place of an op's name, see `passes.mesh.Axis`


class PlanError(AutoparError):
    """A plan that cannot be read, or that contradicts itself."""


class Preference(NamedTuple):
    """A dim that is to be split. only: in ops of this name, or by the
    alternative of this one (`passes.shard.alternatives`); empty: wherever it flows."""

    dim: str
    only: str = ""

    @classmethod
    def parse(cls, text: str) -> Preference:
        """Reads `op:dim` or `dim`."""
        only, _, dim = text.rpartition(":")
        return cls(dim, only)

    def __str__(self) -> str:
        return f"{self.only}:{self.dim}" if self.only else self.dim


@dataclass(frozen=True)
class Plan:
    """Decisions only: what follows from them is found out again by compiling.

    mesh: the process mesh. microbatches: parts of the batch, run one after another.
    schedule, stages_per_rank: the pipeline schedule; "auto": made for what the stages
    take, see `passes.schedule.fit_schedule`. order: of "auto", what each pipeline rank
    does in turn, as `0F0 0F1 0I0`; empty: made when the plan is compiled.
    split: mesh axis (or `time`) -> dims that it splits, in order of preference.
    hints: parameter pattern -> `dim/axis`.
    op_shardings: mesh axis -> op -> the dim of it that the axis splits, see
    `passes.shard.plan_shardings`.
    cuts: for each pipeline boundary the value that crosses it, or the layer that begins
    there (`transformer.h.6`); empty: balanced by cost.
    recompute: "none", "selective" or "full", see `passes.recompute`; "auto": of
    each layer what fits into memory, see `passes.search.choose_recompute`.
    recompute_layers: layer -> the same, where it differs. loss_chunks: of how many
    chunks of positions the loss is the sum, whose logits are made again, see
    `passes.capture.normalize.chunk_loss`. memory: bytes that a rank may
    use, 0 for no limit.
    zero: what data parallel ranks share out, 0 to 3, see
    `passes.shard.parameter_sharding`.
    zigzag: axes whose ranks hold of a dim a piece from its front and the mirror image
    from its back, instead of one piece, and of parameters all: see
    `passes.shard.layout`.
    offload: whether an optimizer updates copies on the CPU, see
    `autopar.runtime.parameters.offload`.
    precision: a key of `PRECISION`.
    tf32: whether GPUs multiply float32 by their TF32 tensor cores, see
    `autopar.runtime.execute.tf32`; False: as torch is set.
    backend: "eager", "inductor" or "auto", see `BACKENDS`; the text is the same.
    """

    mesh: Mesh
    microbatches: int = 1
    schedule: str = USUAL_SCHEDULE
    stages_per_rank: int = 1
    order: tuple[str, ...] = ()
    split: Mapping[str, tuple[str, ...]] = field(default_factory=usual_split)
    hints: Mapping[str, str] = field(default_factory=dict)
    op_shardings: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    cuts: tuple[str, ...] = ()
    recompute: str = "none"
    zero: int = 0
    zigzag: tuple[str, ...] = ()
    offload: bool = False
    recompute_layers: Mapping[str, str] = field(default_factory=dict)
    loss_chunks: int = 1
    memory: int = 0
    precision: str = "model"
    tf32: bool = False
    backend: str = AUTO

    def __post_init__(self) -> None:
        for name in (
            "microbatches",
            "stages_per_rank",
            "zero",
            "loss_chunks",
            "memory",
        ):
            check_range(name, getattr(self, name), PlanError)
        if self.schedule not in (*SCHEDULES, AUTO):
            raise PlanError(
                f"no schedule is named {self.schedule!r}",
                fix=f"use one of {', '.join((*SCHEDULES, AUTO))}",
            )
        if self.order and self.schedule != AUTO:
            raise PlanError(
                f"the plan has an order, but schedule {self.schedule!r} has its own",
                fix='use schedule "auto", or leave the order out',
            )
        self._check_recompute()
        self._check_axes()
        for axis in self.zigzag:
            splits = self.split.get(axis, ())
            if axis not in AXES or axis == PIPELINE or "batch" in splits:
                raise PlanError(
                    f"zigzag has {axis!r}, which splits no sequence",
                    fix="name axes that split one, as in ('cp',)",
                )
        check_choice("precision", self.precision, PRECISION, PlanError)
        check_choice("backend", self.backend, (*BACKENDS, AUTO), PlanError)
        self._check_shares()

    def _check_axes(self) -> None:
        """Checks that decisions are about axes that exist."""
        for axis, dims in self.split.items():
            if axis not in (*AXES, TIME):
                raise PlanError(
                    f"'split' in the plan has {axis!r}: {dims!r}",
                    fix='write for instance "tp": ["heads", "ffn"], for axes of '
                    f"{', '.join((*AXES, TIME))}",
                )
        for axis, own in self.op_shardings.items():
            if axis not in AXES or axis == PIPELINE:
                raise PlanError(
                    f"'op_shardings' in the plan has {axis!r}: {shown(own)}",
                    fix='write for instance "tp": {"blocks.*.mlp.up:linear": "ffn"}, '
                    f"for axes of {', '.join(a for a in AXES if a != PIPELINE)}",
                )

    def _check_shares(self) -> None:
        """ZeRO needs ranks to share out to, and an axis fsdp something to share out."""
        if self.zero and not any(self._holds_alike(a) for a, _ in self.mesh.axes):
            raise PlanError(
                f"zero={self.zero}, but mesh '{self.mesh}' has no axis whose ranks "
                "hold the same parameters",
                fix="add an axis of data parallel ranks, as dp=2, or use zero=0",
            )
        if not self.zero and self.mesh.needs_zero:
            raise PlanError(
                f"mesh '{self.mesh}' has an axis fsdp, but zero=0 shares nothing out",
                fix="use zero=1, 2 or 3, or name the axis dp",
            )

    def _check_recompute(self) -> None:
        check_choice("recompute", self.recompute, (*POLICIES, AUTO), PlanError)
        for layer, policy in self.recompute_layers.items():
            check_choice(f"recompute_layers[{layer!r}]", policy, POLICIES, PlanError)
        if self.recompute == AUTO and not self.memory:
            raise PlanError(
                'recompute="auto" needs to know how much memory there is',
                fix='give memory="16GiB", what one rank may use',
            )

    def policy(self, layer: str) -> str:
        """The recomputation policy of a layer; if nobody chose one `none`, or `full` of
        a checkpoint that the model itself has."""
        usual = "none" if self.recompute == AUTO else self.recompute
        usual = "full" if is_checkpoint(layer) else usual
        return self.recompute_layers.get(layer, usual)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split tensors, outermost first: time, and the mesh but pp.

        Ranks can exchange what they hold of one microbatch, but nothing across them.
        """
        mesh = [name for name, size in self.mesh.stage_axes if size > 1]
        # Innermost: what is split by samples can then leave it for experts alone.
        mesh.sort(key=lambda name: AXES[name].holds_experts)
        return (TIME, *mesh) if self.microbatches > 1 else tuple(mesh)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that split the batch: each rank has other samples."""
        return tuple(a for a in self.axes if self._splits_samples(a))

    def _splits_samples(self, axis: str) -> bool:
        """Whether all that an axis splits, but for some ops, is the batch."""
        return [p.dim for p in self.preferences(axis) if not p.only] == ["batch"]

    def preferences(self, axis: str) -> tuple[Preference, ...]:
        """The dims that an axis may split, in order of preference."""
        return tuple(map(Preference.parse, self.split.get(axis, ())))

    @property
    def parameter_axes(self) -> tuple[str, ...]:
        """The axes over which parameters are split while nothing computes with them.

        Those whose ranks would all hold the same. Where the mesh has an axis fsdp, what
        dp ranks hold stays the same: they replicate the shares (hybrid sharding, Zhao
        2023, arXiv:2304.11277, section 3.2.2).
        """
        mesh = dict(self.mesh.axes)
        alike = (a for a in self.axes if self._holds_alike(a))
        sharing = tuple(a for a in alike if AXES[a].replicated_beside not in mesh)
        return sharing if self.zero else ()

    def _holds_alike(self, axis: str) -> bool:
        """Whether ranks of a mesh axis have other samples or tokens, and would hold the
        same parameters (but experts, which lie as they are used)."""
        if axis == TIME:
            return False
        return AXES[axis].shares_parameters or self._splits_samples(axis)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that products compute in; None: that of their operands."""
        return low_dtype(self.lowering)

    @property
    def lowering(self) -> Lowering:
        """How the model is run for that."""
        return PRECISION[self.precision]

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would get lost below the smallest number of the dtype."""
        return self.dtype is torch.float16

    @property
    def stages(self) -> int:
        return self.mesh.pipeline_ranks * self.stages_per_rank

    @property
    def needs_costs(self) -> bool:
        """Whether seconds decide anything: cuts of stages, order of actions, or
        recomputation."""
        return self.stages > 1 or self.recompute == AUTO

    def decided_schedule(self) -> Schedule:
        """The schedule named or listed, with its messages. Raises ScheduleError."""
        args = self.mesh.pipeline_ranks, self.microbatches, self.stages_per_rank
        if self.schedule == AUTO:
            return read_order(self.order, *args)
        return add_communication(make_schedule(self.schedule, *args))

    @property
    def splits_backward(self) -> bool:
        """Whether backwards run in halves, as with a schedule that is made."""
        if self.schedule == AUTO and not self.order:
            return True
        return self.decided_schedule().splits_backward

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage; none before a schedule is made."""
        if self.schedule == AUTO:
            return ()
        ranks = self.mesh.pipeline_ranks
        return place_stages(self.schedule, ranks, self.stages_per_rank)

    def size(self, axis: str) -> int:
        """The number of ranks of an axis; of time, the number of microbatches."""
        return self.microbatches if axis == TIME else self.mesh.axis_size(axis)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes that split tensors."""
        return {axis: self.size(axis) for axis in self.axes}

    def to_json(self) -> str:
        data = asdict(self)
        data["mesh"] = str(self.mesh)
        return json.dumps({"format": FORMAT, **data}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read `to_json`'s text. Raises PlanError that names the key at fault."""
        data = parse_json(text, "the plan", PlanError, WRITTEN)
        if not isinstance(data, dict):
            raise PlanError("the plan is not a JSON object", fix=AGAIN)
        if data.pop("format", None) != FORMAT:
            raise PlanError(f"the plan is not of format {FORMAT}", fix=AGAIN)
        if "mesh" not in data:
            raise PlanError("the plan has no mesh", fix=MESH)
        if not isinstance(data["mesh"], str):
            raise PlanError(f"'mesh' in the plan is {shown(data['mesh'])}", fix=MESH)
        plan: Plan = decode(cls, data, "the plan", PlanError, USUAL)
        return plan


def fit_plan(
    plan: Plan,
    seconds: Sequence[Seconds],
    footprints: Sequence[Footprint],
    limits: Limits,
    send: float,
) -> Schedule:
    """Makes the schedule that a plan leaves open. See `fit_schedule`: what stages take
    of one microbatch. send: seconds of a message. Raises ScheduleError."""
    args = plan.microbatches, plan.mesh.pipeline_ranks, plan.stages_per_rank
    return fit_schedule(*args, seconds, footprints, limits, send).schedule
