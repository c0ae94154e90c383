"""Emitted modules as text: what they declare and call, and how a person reads them.

Nothing here runs a module.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import fill, indent

from passes.errors import AutoparError
from passes.program import Program

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Message = tuple[tuple[int, ...], str]  # shape and name of the dtype
Messages = tuple[Message, ...]


class InspectionError(AutoparError):
    """A rank or stage that the program does not have."""


@dataclass(frozen=True)
class StageModule:
    """What a module declares.

    sends, d_receives: what it hands on, forward and backward, for one microbatch.
    flops: floating point operations of the forward of one microbatch.
    """

    sends: Messages
    d_receives: Messages
    flops: int


def read_module(text: str) -> StageModule:
    found: dict[str, ast.expr] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    return StageModule(
        _messages(found["SENDS"]),
        _messages(found["D_RECEIVES"]),
        ast.literal_eval(found["FLOPS"]),
    )


def _messages(table: ast.expr) -> Messages:
    assert isinstance(table, ast.List), "messages are a list of (shape, dtype)"
    rows = []
    for row in table.elts:
        if isinstance(row, ast.Tuple):
            shape, dtype = row.elts
            name = ast.unparse(dtype).removeprefix("torch.")
            rows.append((ast.literal_eval(shape), name))
    return tuple(rows)


def collectives_in(text: str) -> Counter[tuple[str, str, tuple[str, ...]]]:
    """(function, kind, axes) -> number of calls in a module's text."""
    found: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    for function in ast.parse(text).body:
        if isinstance(function, ast.FunctionDef):
            found.update((function.name, *call) for call in _calls(function))
    return found


def _calls(function: ast.FunctionDef) -> Iterator[tuple[str, tuple[str, ...]]]:
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner, kind = node.func.value, node.func.attr
        if isinstance(owner, ast.Name) and owner.id == "c" and kind in COLLECTIVES:
            axes = ast.literal_eval(node.args[1])
            yield kind, (axes,) if isinstance(axes, str) else axes


def listing(program: Program, rank: int | None = None, stage: int | None = None) -> str:
    """The modules of a rank or of a stage, with what their relative names stand for.

    Raises: InspectionError, MeshError.
    """
    if stage is not None and not 0 <= stage < len(program.stages):
        raise InspectionError(
            f"there is no stage {stage}",
            fix=f"the stages are 0 to {len(program.stages) - 1}",
        )
    if rank is None:
        assert stage is not None, "list a rank, a stage, or a rank's stage"
        users = users_of(program, stage)
        return "\n\n".join(
            _heading(program, stage, ranks) + program.modules[key]
            for key, ranks in users.items()
        )
    own = program.stages_of(rank)
    if stage is not None and stage not in own:
        raise InspectionError(
            f"rank {rank} does not run stage {stage}",
            fix=f"it runs {', '.join(map(str, own))}",
        )
    return "\n\n".join(
        _heading(program, i, [rank]) + program.modules[program.module_of(rank, i)]
        for i in (own if stage is None else (stage,))
    )


def users_of(program: Program, stage: int) -> dict[str, list[int]]:
    """Key of a module -> the ranks that run it for this stage."""
    found: dict[str, list[int]] = {}
    for rank in range(program.mesh.size):
        if stage in program.stages_of(rank):
            found.setdefault(program.module_of(rank, stage), []).append(rank)
    return found


def _heading(program: Program, stage: int, ranks: list[int]) -> str:
    """Comment lines: where the module runs, and which layer `+0` is."""
    places = []
    for rank in ranks:
        coords = ", ".join(f"{a}={i}" for a, i in program.mesh.coords(rank).items())
        places.append(f"rank {rank}" + (f" ({coords})" if coords else ""))
    lines = [f"stage {stage} of {len(program.stages)}: {', '.join(places)}"]
    layers: dict[str, dict[str, str]] = {}
    for own, name in program.stages[stage].names.items():
        prefix, plus, rest = own.partition(".+")
        if plus:
            number = name.removeprefix(prefix + ".").partition(".")[0]
            layers.setdefault(prefix, {})["+" + rest.partition(".")[0]] = number
    for prefix, numbers in layers.items():
        pairs = ", ".join(f"{own} is {number}" for own, number in numbers.items())
        lines.append(f"  {prefix}: {pairs}")
    text = "\n".join(fill(line, 96, subsequent_indent="    ") for line in lines)
    return indent(text, "# ", lambda line: True) + "\n"
