"""A large program at its own size, without numbers: whether its ranks meet.

Each distinct module runs once on tensors of the meta device, on one of the ranks that
run it. So nothing is read before it is made, and shapes are those that ops expect.
Ranks that meet in a collective must make the same calls in the same order, and what one
stage sends must be what the next receives.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from autopar.passes.capture.forward.on_meta import META, Shapes
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import PIPELINE, Mesh
from autopar.passes.ops.random import CHANCE
from autopar.passes.program import Program, coords_text
from autopar.passes.proof_record import CutShort
from autopar.passes.schedule.check_schedule import check
from autopar.passes.shard.layout import extent
from autopar.passes.traced import Traced
from autopar.proof.ranks import VerificationFailed
from autopar.runtime.comm.fake_comm import FakeComm
from autopar.runtime.comm.work import Arrived, Call, Work
from autopar.runtime.execute.executor import Executor
from autopar.runtime.execute.rehearse import play
from autopar.runtime.execute.running_stage import load_module
from autopar.runtime.parameters.shards import local_shape

# What a meta tensor cannot tell: how many rows go where.
UNKNOWN = "Cannot copy out of meta tensor", "on tensor on meta", "meta tensors"


Heard = tuple[str, Call]
"""The function that made a call, and the call."""


class Listener(FakeComm):
    """Notes the calls of one rank."""

    def __init__(self, mesh: Mesh, microbatches: int, rank: int) -> None:
        super().__init__(mesh, microbatches, META, rank)
        self.calls: list[Heard] = []
        self.draws: dict[str, list[int]] = {}  # function -> their numbers, in order
        self.function = ""

    def enter_function(self, name: str) -> None:
        """Names the function that runs, for messages."""
        self.function = name

    def dropout_counters(
        self, number: int, position: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        self.draws.setdefault(self.function, []).append(number)
        return super().dropout_counters(number, position)

    def draw(self, kind: str, number: int, position: Any, dtype: torch.dtype) -> Tensor:
        self.draws.setdefault(self.function, []).append(number)
        shape = [
            prod(extent(self.pieces(n, axes)) for n, axes in factors)
            for factors in position
        ]
        return torch.empty(shape, dtype=dtype, device=META)

    def _start_scatter_sum(
        self, x: Tensor, counts: list[int], ranks: tuple[int, ...]
    ) -> Work:
        return Arrived(x.new_empty(counts[ranks.index(self.rank)]))  # not one by one

    def _announce(self, call: Call) -> None:
        self.calls.append((self.function, call))


def check_full_size(program: Program, traced: Traced) -> tuple[CutShort, ...]:
    """Returns the modules that did not run to their end: where one routes rows by their
    values, shapes of the rest depend on these.

    Raises VerificationFailed.
    """
    check(program.schedule)
    modules: dict[tuple[int, str], list[Heard]] = {}
    declared: dict[tuple[int, str], Mapping[str, Any]] = {}
    cut: list[CutShort] = []
    numbers = _numbers(traced) if program.draw or program.has_dropout else []
    drawn: int | None = 0
    shapes = Shapes()
    for index, stage in enumerate(program.stages):
        first = drawn
        for key, rank in _first_ranks(program, index).items():
            ran = run_module(program, index, rank, shapes)
            comm, declared[index, key], cut_short = ran
            modules[index, key] = comm.calls
            cut += cut_short
            drawn = _check_draws(comm.draws, numbers, index, first)
            drawn = None if cut_short else drawn
        _check_meetings(program, index, modules)
        assert stage.modules, "a stage runs on some ranks"
    _check_messages(program, declared)
    return tuple(cut)


def _numbers(traced: Traced) -> list[int]:
    """The numbers of the random draws and dropout masks that a model reads."""
    nodes = normalize(traced).graph.nodes
    return [node.arg("number") for node in nodes if node.op in CHANCE]


def _check_draws(
    drawn: Mapping[str, list[int]],
    numbers: Sequence[int],
    stage: int,
    first: int | None,
) -> int | None:
    """Masks of dropout and random numbers are those of the model: a stage draws the
    next ones, in turn, and may draw some of those before it, of what it computes for
    itself. What is computed again has one of these, each once. numbers: the model's.
    first: of this stage, None if it is not known. Returns the first of the next."""
    own = drawn.get("forward", [])
    draws = own if first is None else [n for n in own if n >= first]
    start = draws[0] if first is None and draws else first or 0
    in_turn = draws == [n for n in numbers if n >= start][: len(draws)]
    again = [n for name, nodes in drawn.items() if name != "forward" for n in nodes]
    if not in_turn or len({*again}) < len(again) or not {*again} <= {*own}:
        raise VerificationFailed(
            f"stage {stage} draws random numbers {own}, and again {again}, which "
            "are not the model's"
        )
    return draws[-1] + 1 if draws else start


def _first_ranks(program: Program, stage: int) -> dict[str, int]:
    """Key of each module of a stage -> the first rank that runs it; the others have
    shares of its shapes. Raises VerificationFailed."""
    mesh = program.mesh
    specs = {
        (spec.shape, spec.factors, spec.slots): spec
        for name in program.stages[stage].names.values()
        if (spec := program.tensors.get(name)) is not None
    }
    first: dict[str, int] = {}
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for text, key in program.stages[stage].modules.items():
        coords = _coords(program, stage, text)
        local_shapes = [local_shape(spec, mesh, coords) for spec in specs.values()]
        rank = mesh.rank(coords)
        if shapes.setdefault(key, local_shapes) != local_shapes:
            raise VerificationFailed(
                f"ranks {first[key]} and {rank} run one module of stage {stage}, with "
                "shares of other shapes"
            )
        first.setdefault(key, rank)
    return first


def _coords(program: Program, stage: int, text: str) -> dict[str, int]:
    """A rank that runs a stage; text: coordinates that the stage tells, without pp."""
    stated = dict(part.split("=") for part in text.split(",") if part)
    coords = {axis: int(stated.get(axis, 0)) for axis, _ in program.mesh.axes}
    if PIPELINE in coords:
        coords[PIPELINE] = program.schedule.stage_to_rank[stage]
    return coords


def run_module(
    program: Program, index: int, rank: int, shapes: Shapes
) -> tuple[Listener, Mapping[str, Any], list[CutShort]]:
    """Runs a stage's module on a rank of the meta device. Returns what it told others,
    what the module declares, where it stopped too early. Raises VerificationFailed."""
    comm = Listener(program.mesh, program.plan.microbatches, rank)
    held = {
        name: nn.Parameter(
            torch.empty(
                local_shape(spec, program.mesh, comm.coords),
                dtype=getattr(torch, spec.dtype),
                device=META,
            ),
            requires_grad=spec.trainable,
        )
        for name, spec in program.parameters.items()
        if program.holds(name, rank)
    }
    buffers = {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=META)
        for name, spec in program.buffers.items()
    }
    batch = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=META)
        for name, (shape, dtype) in program.inputs.items()
    }
    try:
        stage = Executor(program, comm, held, buffers).stages[index]
        comm.calls.clear()  # of all stages' setups
        with torch.no_grad(), shapes:
            play(comm, stage, batch, comm.enter_function)
    except AutoparError:
        raise
    except (RuntimeError, NameError, ValueError, TypeError, KeyError) as error:
        problem = str(error).partition("\n")[0]
        if any(text in str(error) for text in UNKNOWN):
            key = program.module_of(rank, index)
            place = _statement(error)
            stopped = CutShort(index, key, comm.function, *place, problem)
            return comm, load_module(program.modules[key], key), [stopped]
        raise VerificationFailed(
            f"stage {index} does not run on rank {rank} at its own size: {problem}"
        ) from error
    return comm, stage.module, []


def _statement(error: BaseException) -> tuple[str, str]:
    """The statement of the emitted module that raised, and its place in the model."""
    lines = [
        frame.line or ""
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith("<autopar.emitted.")
    ]
    code, _, remark = lines[-1].partition("  # ") if lines else ("", "", "")
    parts = [part for part in remark.split("  ") if not part.startswith("[")]
    return code, " ".join(parts)


def _check_meetings(
    program: Program, index: int, modules: Mapping[tuple[int, str], list[Heard]]
) -> None:
    """Ranks that share an axis make the same calls over it, in the same order."""
    mesh, stage = program.mesh, program.stages[index]
    keys = set(stage.modules.values())
    if len(keys) < 2:
        return
    for axes in {call.axes for key in keys for _, call in modules[index, key]}:
        calls = {
            key: [heard for heard in modules[index, key] if heard[1].axes == axes]
            for key in keys
        }
        groups: dict[str, dict[str, int]] = {}  # -> its modules, a rank of each
        for text, key in stage.modules.items():
            coords = _coords(program, index, text)
            group = coords_text({a: n for a, n in coords.items() if a not in axes})
            groups.setdefault(group, {}).setdefault(key, mesh.rank(coords))
        pairs = {
            (mine, theirs): (ranks[mine], ranks[theirs])
            for ranks in groups.values()
            for mine, theirs in pairwise(ranks)
        }
        for (mine, theirs), met in pairs.items():
            _check_same(calls[mine], calls[theirs], *met)


def _check_same(left: list[Heard], right: list[Heard], rank: int, other: int) -> None:
    for pair in zip_longest(left, right):
        a, b = (heard and (heard[0], heard[1].common()) for heard in pair)
        if a != b:
            ours, theirs = (f"{x[1]} in {x[0]}" if x else "nothing more" for x in pair)
            raise VerificationFailed(
                f"ranks {rank} and {other} do not meet: {ours} on the one, {theirs} on "
                "the other"
            )


def _check_messages(
    program: Program, declared: Mapping[tuple[int, str], Mapping[str, Any]]
) -> None:
    """Checks that a stage sends what the next one receives, forward and backward."""
    for index, (before, after) in enumerate(pairwise(program.stages)):
        for coords, key in before.modules.items():
            left = declared[index, key]
            right = declared[index + 1, after.modules[coords]]
            for ours, theirs in (("SENDS", "RECEIVES"), ("D_SENDS", "D_RECEIVES")):
                a, b = ([row for row in x if row] for x in (left[ours], right[theirs]))
                if a != b:
                    raise VerificationFailed(
                        f"stage {index} and the next one disagree on what goes between "
                        f"them ({coords or 'one rank'}): {a} and {b}"
                    )
