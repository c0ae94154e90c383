"""The parameters of a program, their named dims and where they rest, as a table."""

from __future__ import annotations

from autopar.passes.graph import LAYER, short
from autopar.passes.program import ParameterSpec, Program
from autopar.reports.tables import Table, ranges

NAME = 40  # characters of a parameter's name in a line


def parameter_table(program: Program, every: bool = False) -> Table:
    """Shows the named dims and the sharding of parameters; equal layers share a row.

    every: one row for each parameter instead.
    """
    rows: dict[tuple[str, ...], tuple[list[int], set[int]]] = {}
    for name, spec in program.tensors.items():
        layer = None if every else LAYER.search(name)
        before, after = (name, "")
        if layer:
            before, after = name[: layer.start()], name[layer.end() :]
        shape = "x".join(map(str, spec.shape))
        dims = " ".join([spec.pattern, *(f"+{axis}" for axis in spec.pending)])
        key = (before, after, shape, dims, _gathering(program, spec))
        layers, stages = rows.setdefault(key, ([], set()))
        layers.extend([int(layer[1])] if layer else [])
        stages.update(spec.stages)
    shown = ("gathered",) if program.plan.zero else ()
    table = tuple(
        (
            _folded(before + ranges(layers) + after),
            shape,
            dims,
            ranges(list(stages)),
            *((gathering,) if shown else ()),
        )
        for (before, after, shape, dims, gathering), (layers, stages) in rows.items()
    )
    notes = [f"tied: {alias} is {name}" for alias, name in program.aliases.items()]
    return Table(
        "named dims (dim/axis: split on that axis; +axis: gradient summed over it "
        "once a step)",
        ("parameter", "shape", "named dims", "stage", *shown),
        table,
        (*notes, *program.remarks),
    )


def update_table(program: Program) -> Table:
    """Shows the buffers that a step writes to; equal layers share a row."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for name, update in program.updates.items():
        layer = LAYER.search(name)
        before, after = name, ""
        if layer:
            before, after = name[: layer.start()], name[layer.end() :]
        sums = ", ".join(v.type for v in update.inputs)
        ops = ", ".join(short(node.op) for node in update.nodes)
        key = (before, after, update.outputs[0].type, sums, ops)
        rows.setdefault(key, []).extend([int(layer[1])] if layer else [])
    return Table(
        "buffers that a step writes to, on all ranks alike",
        ("buffer", "type", "summed over the batch", "then"),
        tuple(
            (_folded(before + ranges(layers) + after), kind, sums, ops)
            for (before, after, kind, sums, ops), layers in rows.items()
        ),
    )


def _gathering(program: Program, spec: ParameterSpec) -> str:
    """How often a sharded parameter is gathered for its uses."""
    when = "a block ahead" if program.plan.zero == 3 else "once a step"
    return when if spec.gathered else ""


def _folded(name: str) -> str:
    """A long name on two lines, cut at a dot."""
    if len(name) <= NAME:
        return name
    dot = name.rfind(".", 0, NAME)
    return f"{name[: dot + 1]}\n  {name[dot + 1 :]}" if dot > 0 else name
