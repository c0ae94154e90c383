"""Reading a stored program: what it lacks or contradicts is named, before it runs."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from .decode import decode_fields, parse_json
from .errors import AutoparError
from .graph import Graph, InvalidGraph
from .plan import AGAIN, Plan
from .program import ELSEWHERE, FORMAT, ParameterSpec, Program, coords_text
from .schedule.footprint import COMMUNICATION_PARTS
from .schedule.schedule import Schedule

WHERE = "program.json"
DTYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values()
          if isinstance(t, torch.dtype)}  # fmt: skip


class ProgramError(AutoparError):
    """A program that cannot be read."""


def read_program(text: str, plan: Plan, modules: Mapping[str, str]) -> Program:
    """Reads the text of `Program.to_json`. Raises ProgramError, naming the place."""
    data = parse_json(text, WHERE, ProgramError, AGAIN)
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise ProgramError(f"{WHERE} is not of format {FORMAT}", fix=AGAIN)
    if "parameters" in data:  # as it was called when they were all of the model's
        data["tensors"] = data.pop("parameters")
    written = {
        "schedule": tuple[str, ...],
        "literals": Mapping[str, _Literal],
        "updates": Mapping[str, tuple[str, ...]],
    }
    read = decode_fields(Program, data, WHERE, ProgramError, AGAIN, written, ELSEWHERE)
    read["schedule"] = Schedule.parse("\n".join(read["schedule"]))
    read["literals"] = {k: v.tensor(k) for k, v in read["literals"].items()}
    read["updates"] = {k: _update(k, v) for k, v in read.get("updates", {}).items()}
    program = Program(plan=plan, modules=modules, **read)
    for fault in _faults(program):
        raise ProgramError(f"{WHERE} contradicts itself: {fault}", fix=AGAIN)
    return program


def _update(buffer: str, lines: tuple[str, ...]) -> Graph:
    """What a step makes of a buffer. Raises: ProgramError."""
    try:
        return Graph.parse("\n".join(lines))
    except InvalidGraph as error:
        raise ProgramError(
            f"the update of the buffer '{buffer}' in {WHERE} cannot be read: {error}",
            fix=AGAIN,
        ) from None


@dataclass(frozen=True)
class _Literal:
    """A constant as `Program.to_json` writes it; data: its bytes in base 64."""

    dtype: str
    shape: tuple[int, ...]
    data: str

    def tensor(self, name: str) -> torch.Tensor:
        """Raises: ProgramError."""
        try:
            raw = bytearray(base64.b64decode(self.data, validate=True))
        except binascii.Error:
            raw = bytearray()
        dtype = DTYPES.get(self.dtype)
        if dtype is None or len(raw) != prod(self.shape) * dtype.itemsize:
            raise ProgramError(
                f"the constant '{name}' in {WHERE} is no {self.dtype}"
                f"{list(self.shape)}",
                fix=AGAIN,
            )
        if not raw:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype).reshape(self.shape)


def _faults(program: Program) -> Iterator[str]:
    """Yields the contradictions between parts of a program."""
    stages, ranks = len(program.stages), program.mesh.pipeline_ranks
    placement, specs = program.schedule.stage_to_rank, dict(program.tensors)
    specs |= program.buffers
    if len(program.schedule.ranks) != ranks or not set(placement) <= set(range(ranks)):
        yield f"its schedule is not for {ranks} pipeline ranks"
    if len(placement) != stages:
        yield f"it has {stages} stages, its schedule {len(placement)}"
    if program.schedule.microbatches != program.plan.microbatches:
        yield f"its schedule is not for {program.plan.microbatches} microbatches"
    if any(a.stage >= stages for row in program.schedule.ranks for a in row):
        yield "its schedule has actions of stages that are not there"
    if len(program.memory) != ranks:
        yield f"it has the memory of {len(program.memory)} ranks, not of {ranks}"
    if not any(shape for shape, _ in program.inputs.values()):
        yield "no field of its batch has samples"
    if any(c.part not in COMMUNICATION_PARTS for c in program.communication):
        yield "it has messages of no part of a step"
    places = {coords_text(program.mesh.coords(r)) for r in range(program.mesh.size)}
    for i, stage in enumerate(program.stages):
        if set(stage.modules) != places:
            yield f"stage {i} has modules for other ranks than the mesh"
        for name in stage.names.values():
            if name not in specs:
                yield f"stage {i} uses '{name}', which is not described"
            elif name in program.tensors and i not in specs[name].stages:
                yield f"stage {i} uses '{name}', which lies elsewhere"
        took = stage.took
        if min(took.forward, took.backward, took.weight, took.send) < 0:
            yield f"stage {i} takes less than no time"
    for name, update in program.updates.items():
        sources = {v.name for v in update.sources} - program.literals.keys()
        if unknown := sorted(sources - program.buffers.keys() - {*program.outputs}):
            yield f"the update of '{name}' reads '{unknown[0]}', which is not described"
        if name not in program.buffers or len(update.outputs) != 1:
            yield f"'{name}' is no buffer that a step can update"
    dtypes = {program.loss_dtype, *(dtype for _, dtype in program.inputs.values())}
    if unknown := sorted(dtypes - set(DTYPES)):
        yield f"{unknown[0]!r} is no dtype"
    known = {name for name, _ in program.mesh.axes} | {"time"}
    for name, spec in specs.items():
        if not _is_tensor(spec) or not set(spec.stages) <= set(range(stages)):
            yield f"'{name}' is no tensor that its stages can hold"
        if not {*spec.cut_axes, *spec.pending, *spec.gathered} <= known:
            yield f"'{name}' is split over axes that the mesh lacks"


def _is_tensor(spec: ParameterSpec) -> bool:
    """Whether each dim has factors, and each of them a name and a slot."""
    rows = list(zip(spec.factors, spec.dims, spec.slots, strict=False))
    return (
        spec.dtype in DTYPES
        and {len(spec.factors), len(spec.dims), len(spec.slots)} == {len(spec.shape)}
        and all(len(f) == len(d) == len(s) for f, d, s in rows)
    )
