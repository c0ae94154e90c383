"""The program: everything that ranks need to run, as data beside the emitted text."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from .capture.rows.input_ranges import InputRange
from .dims.name_dims import UNNAMED, dim_text
from .graph import Graph
from .mesh import PIPELINE, Mesh
from .part import Part, part_name
from .plan import Plan
from .price.account import Account
from .price.stage_seconds import StageSeconds
from .proof_record import Proof
from .schedule.footprint import Communication, Footprint
from .schedule.memory import RankMemory
from .schedule.schedule import Schedule

FORMAT = 6
ELSEWHERE = frozenset({"plan", "modules", "proof"})  # in other files of a plan


@dataclass(frozen=True)
class Row:
    """Which of the parameters that are stacked in a tensor one is.

    tensor: by the name that stages have for it. index: its place among them. factors,
    slots: of the dim along which they are stacked, as of a `ParameterSpec`.
    """

    tensor: str
    index: int
    factors: tuple[int, ...]
    slots: tuple[tuple[str, ...], ...]

    def here(self, mesh: Mesh, coords: Mapping[str, int]) -> int | None:
        """The row's place in the shard of the rank at `coords`; None if it has none."""
        place, unit, left = 0, 1, self.index
        for extent, axes in zip(self.factors[::-1], self.slots[::-1], strict=True):
            begin, length = mesh.span(extent, axes, coords)
            left, at = divmod(left, extent)
            if not begin <= at < begin + length:
                return None
            place, unit = place + (at - begin) * unit, unit * length
        return place


@dataclass(frozen=True)
class ParameterSpec:
    """How a parameter or buffer is sharded, and how its gradient is completed.

    factors, dims, slots: for each tensor dim its named factors: sizes, names, and the
    axes that split them. pending: axes over which its gradient is a pending sum at the
    end of a step. gathered: axes over which it is gathered for its uses, and its
    gradient scattered. stages: those that hold it (several for a tied weight). part:
    what it is of a parameter of the model; mostly all of it. row: what it is of a
    tensor in which ranks have several.
    """

    shape: tuple[int, ...]
    dtype: str
    factors: tuple[tuple[int, ...], ...]
    dims: tuple[tuple[str, ...], ...]
    slots: tuple[tuple[tuple[str, ...], ...], ...]
    pending: tuple[str, ...]
    gathered: tuple[str, ...]
    stages: tuple[int, ...]
    trainable: bool
    part: Part
    row: Row | None = None

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """The axes that split its dims."""
        return tuple(a for dim in self.slots for axes in dim for a in axes)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes whose ranks hold different parts of a parameter."""
        rows = self.row.slots if self.row else ()
        return (*self.cut_axes, *(a for axes in rows for a in axes))

    def rows(self, name: str, sources: Sequence[str]) -> Iterator[ParameterSpec]:
        """Yields the spec of each parameter of the model that this tensor stacks.
        sources: their names."""
        for index, source in enumerate(sources):
            row = Row(name, index, self.factors[0], self.slots[0])
            part = Part(source, self.part.shape[1:], self.part.start[1:])
            dims = self.factors[1:], self.dims[1:], self.slots[1:]
            yield ParameterSpec(
                self.shape[1:], self.dtype, *dims, self.pending, self.gathered,
                self.stages, self.trainable, part, row,
            )  # fmt: skip

    @property
    def pattern(self) -> str:
        """`embed (3 heads/tp head_dim)`; a dim without a name shows its extent."""
        texts = []
        for sizes, names in zip(self.factors, self.dims, strict=True):
            own = zip(sizes, names, strict=True)
            texts.append([str(n) if UNNAMED.fullmatch(d) else d for n, d in own])
        return " ".join(map(dim_text, texts, self.slots))


@dataclass(frozen=True)
class OutputSpec:
    """What a model returns beside its loss, and what ranks have of it.

    shape: global. factors, slots: for each dim its named factors' sizes, and the axes
    that split them; "time" is the microbatches'. pending: axes over which it is a
    pending sum. stage: that makes it; place: among the outputs of its forward.
    """

    shape: tuple[int, ...]
    dtype: str
    factors: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[tuple[str, ...], ...], ...]
    pending: tuple[str, ...]
    stage: int
    place: int


@dataclass(frozen=True)
class StageSpec:
    """One pipeline stage: its layers, its parameters, and which text each rank runs.

    names: name in the text -> the model's own. modules: coordinates without pp, as
    text -> key of the emitted module. flops: of one microbatch's forward, on the first
    rank. took: by that rank, one microbatch, where it was compiled. account: what it
    computes, moves and holds.
    """

    layers: tuple[str, ...]
    names: Mapping[str, str]
    modules: Mapping[str, str]
    flops: int
    took: StageSeconds
    account: Account

    @property
    def footprint(self) -> Footprint:
        """Bytes of a stage's activations and messages."""
        return self.took.footprint


@dataclass(frozen=True)
class Program:
    """plan: the decisions. modules: key -> Python text, each distinct text once.

    tensors: what stages compute with, see `parameters`. joined: those that stack
    several parameters of the model -> the names of these.
    inputs: batch field -> (global shape, dtype). loss_pending: axes over which the
    loss is a pending sum; time always, if there are several microbatches. literals:
    constants of the model's code, by name. groups: the sets of axes that collectives
    run over. communication: of each stage's first rank. memory: of each pipeline rank.
    remarks: what the user should know. ranges: batch field -> what its integers may be.
    proof: that it computes what the model does, in a plan directory's manifest.
    outputs: what comes back beside the loss, by name; metrics: how many of these, the
    first, are scalars that every step tells. updates: of each buffer that a step
    changes, what that has after it, of what buffers had and of the last outputs.
    known: buffers of which the model asked what is in them, as whether any of it is
    set -> the digest of what was.
    own_masks: whether dropout leaves out other elements than where the model runs by
    itself.
    """

    plan: Plan
    schedule: Schedule
    stages: tuple[StageSpec, ...]
    tensors: Mapping[str, ParameterSpec]
    buffers: Mapping[str, ParameterSpec]
    aliases: Mapping[str, str]
    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    loss_pending: tuple[str, ...]
    loss_dtype: str
    literals: Mapping[str, torch.Tensor]
    groups: tuple[tuple[str, ...], ...]
    communication: tuple[Communication, ...]
    modules: Mapping[str, str]
    memory: tuple[RankMemory, ...]
    remarks: tuple[str, ...] = ()
    ranges: Mapping[str, InputRange] = field(default_factory=dict)
    proof: Proof | None = None
    outputs: Mapping[str, OutputSpec] = field(default_factory=dict)
    metrics: int = 0
    updates: Mapping[str, Graph] = field(default_factory=dict)
    known: Mapping[str, int] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    own_masks: bool = False

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the outputs that updates of buffers are computed from."""
        return tuple(v.name for g in self.updates.values() for v in g.inputs)

    @property
    def metric_names(self) -> list[str]:
        """Names of the scalars beside the loss."""
        return list(self.outputs)[: self.metrics]

    @property
    def wanted(self) -> list[str]:
        """Names of the outputs that were asked for."""
        last = len(self.outputs) - len(self.sums)
        return list(self.outputs)[self.metrics : last]

    @cached_property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """The tensors that optimizers get: the model's parameters, or parts of them.
        Stages compute with these, and with tensors that stack several of them."""
        specs: dict[str, ParameterSpec] = {}
        for name, spec in self.tensors.items():
            if (sources := self.joined.get(spec.part.source)) is None:
                specs[name] = spec
                continue
            for row in spec.rows(name, sources):
                specs[part_name(row.part, row.shape)] = row
        return specs

    def rows_of(self, name: str) -> tuple[str, ...]:
        """The parameters that are stacked in a stage's tensor; itself, if it is one."""
        return self._rows.get(name, (name,))

    @cached_property
    def _rows(self) -> Mapping[str, tuple[str, ...]]:
        rows: dict[str, list[str]] = {}
        for name, spec in self.parameters.items():
            if spec.row is not None:
                rows.setdefault(spec.row.tensor, []).append(name)
        return {name: tuple(own) for name, own in rows.items()}

    def holds(self, name: str, rank: int) -> bool:
        """Whether a rank has a parameter, or a part of it."""
        spec, mesh = self.parameters[name], self.mesh
        if not {*spec.stages} & {*self.stages_of(rank)}:
            return False
        return spec.row is None or spec.row.here(mesh, mesh.coords(rank)) is not None

    @property
    def sources(self) -> dict[str, list[str]]:
        """The model's own parameters that stages compute with -> their names here: the
        same, or those of several parts."""
        names: dict[str, list[str]] = {}
        for name, spec in self.parameters.items():
            if spec.stages:
                names.setdefault(spec.part.source, []).append(name)
        return names

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the model's own parameters that stages compute with."""
        first = ((n, self.parameters[own[0]]) for n, own in self.sources.items())
        return {name: spec.part.shape for name, spec in first}

    @property
    def has_dropout(self) -> bool:
        """Whether a step has dropout that `evaluate` leaves out."""
        return any("c.dropout_counters(" in text for text in self.modules.values())

    @property
    def draw(self) -> str:
        """The line of the user's source that draws random numbers other than dropout's;
        "" for none."""
        lines = (x for text in self.modules.values() for x in text.splitlines())
        drawing = next((line for line in lines if "c.draw(" in line), "")
        return drawing.partition("]  ")[2] or drawing

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs, first to last."""
        pp = self.mesh.pipeline_rank(rank)
        return tuple(i for i, r in enumerate(self.schedule.stage_to_rank) if r == pp)

    def module_of(self, rank: int, stage: int) -> str:
        """Key of the text that a rank runs for a stage."""
        return self.stages[stage].modules[coords_text(self.mesh.coords(rank))]

    def gradient_ranks(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks over which a parameter's gradient is summed at the end of a step.

        Those that differ from `rank` on the axes where it is pending, and for a tied
        weight on the pipeline ranks that hold it too. Ascending; just `rank` if none.
        """
        axes, held_by = self.gradient_axes(self.parameters[name])
        group = self.mesh.group(rank, axes)
        return tuple(r for r in group if self.mesh.pipeline_rank(r) in held_by)

    def gradient_axes(
        self, spec: ParameterSpec
    ) -> tuple[tuple[str, ...], frozenset[int]]:
        """The axes over which a gradient is summed, and the pipeline ranks that do."""
        held_by = frozenset(self.schedule.stage_to_rank[s] for s in spec.stages)
        return (*spec.pending, *([PIPELINE] if len(held_by) > 1 else [])), held_by

    def reduction_groups(self) -> list[tuple[int, ...]]:
        """Every set of ranks over which a gradient or the loss is summed, in order."""
        place = [self.mesh.pipeline_rank(r) for r in range(self.mesh.size)]
        # Few parameters differ in these.
        kinds = {
            self.gradient_axes(spec)
            for spec in self.tensors.values()
            if spec.trainable and spec.stages
        }
        groups = {
            tuple(r for r in group if place[r] in held_by)
            for axes, held_by in kinds
            for group in self.mesh.groups(axes)
        }
        groups.add(tuple(range(self.mesh.size)))
        return sorted(group for group in groups if len(group) > 1)

    @property
    def batch_extent(self) -> int:
        """Samples in the global batch."""
        return next(shape[0] for shape, _ in self.inputs.values() if shape)

    @property
    def forward_flops(self) -> int:
        """Operations of one forward of the whole batch, on all ranks, by those of the
        first rank of each stage."""
        ranks = self.mesh.size // self.mesh.pipeline_ranks
        once = sum(stage.flops for stage in self.stages)
        return once * ranks * self.plan.microbatches

    def to_json(self) -> str:
        """The text of program.json, which `passes.read_program` reads."""
        own = (f.name for f in fields(self) if f.name not in ELSEWHERE)
        data = {
            "format": FORMAT,
            **{name: getattr(self, name) for name in own},
            "schedule": str(self.schedule).split("\n"),
            "literals": {k: _pack(t) for k, t in self.literals.items()},
            "updates": {k: str(v).split("\n") for k, v in self.updates.items()},
        }
        return json.dumps(data, indent=1, default=asdict) + "\n"


def coords_text(coords: Mapping[str, int]) -> str:
    """`dp=0,tp=1`: a rank's place within its stage."""
    return ",".join(f"{a}={i}" for a, i in coords.items() if a != PIPELINE)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _pack(tensor: torch.Tensor) -> dict[str, Any]:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return {
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "data": base64.b64encode(bytes(raw.tolist())).decode(),
    }
