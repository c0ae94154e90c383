"""Emitted modules as text: what they declare, and how a person reads them.

Nothing here runs a module.
"""

from __future__ import annotations

import ast
from textwrap import fill, indent

from autopar.passes.errors import AutoparError
from autopar.passes.mesh import TIME
from autopar.passes.program import Program

Message = tuple[tuple[int, ...], str]  # shape and name of the dtype
Messages = tuple[Message, ...]


class InspectionError(AutoparError):
    """A rank or stage that the program does not have."""


def sends_of(text: str) -> Messages:
    """The messages to the next stage that a module declares, for one microbatch."""
    _, declared, rest = text.partition("\nSENDS = ")
    assert declared, "an emitted module declares what it sends"
    table = rest.partition("\nD_SENDS = ")[0]  # a whole module takes long to parse
    rows = ast.parse(table, mode="eval").body
    assert isinstance(rows, ast.List), "messages are a list"
    return tuple(map(_message, rows.elts))


def fields_read(program: Program, rank: int) -> dict[str, bool]:
    """Field of a batch that a rank's stages read -> whether they read its own rows
    alone; alike on ranks that differ in the axes alone that split the batch."""
    axes, fields = program.plan.data_axes, dict[str, bool]()
    ranks = program.mesh.group(rank, tuple(a for a in axes if a != TIME))
    for stage in program.stages_of(rank):
        for text in {program.modules[program.module_of(r, stage)] for r in ranks}:
            _, _, table = text.partition("\nINPUTS = ")
            for name, split in ast.literal_eval(table.partition("\n")[0]).items():
                alone = bool(axes) and split[: len(axes)] == axes
                fields[name] = fields.get(name, True) and alone
    return fields


def _message(row: ast.expr) -> Message:
    assert isinstance(row, ast.Tuple), "a message is (shape, dtype)"
    shape, dtype = row.elts
    return ast.literal_eval(shape), ast.unparse(dtype).removeprefix("torch.")


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
    users: dict[str, list[int]] = {}
    place = program.schedule.stage_to_rank[stage]
    for rank in range(program.mesh.size):
        if program.mesh.pipeline_rank(rank) == place:
            users.setdefault(program.module_of(rank, stage), []).append(rank)
    return users


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
