"""write_tables: what an executor must know of an emitted module before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from ..emit.layer_numbers import loop_text
from ..graph import LAYER, Node, Value
from ..mesh import TIME
from ..stage.local_stage import LocalStage


def tables(s: LocalStage, wholes: Mapping[str, Value]) -> str:
    """Writes the executor's tables: local shapes of what comes in and goes out.

    wholes: key in g -> gradient of what is gathered for a step.
    """

    def table(values: Iterable[Value | None]) -> str:
        rows = [f"({v.shape}, {v.dtype})" if v else "None" for v in values]
        return f"[{', '.join(rows)}]"

    trained = [p.name for p in s.params if p.name in s.grads]
    every = trained == [p.name for p in s.params]
    lines = [
        f"\nPARAMETERS = {_entries(s.params)}",
        f"BUFFERS = {_entries(s.buffers)}",
        f"LITERALS = {[v.name for v in s.constants]}",
        f"TRAINED = {'[*PARAMETERS]' if every else trained}",
        f"INPUTS = { ({v.name: _split_over(v, s) for v in s.inputs}) }",
        f"RECEIVES = {table(s.receives)}",
        f"SENDS = {table(s.sends)}",
        f"D_SENDS = {table(s.d_sends)}",
        f"D_RECEIVES = {table(s.d_receives)}",
        f"WHOLE_GRADIENTS = {_families(wholes)}",
        f"FLOPS = {s.flops}",
    ]
    return "\n".join(lines)


def _split_over(field: Value, s: LocalStage) -> tuple[str, ...]:
    """The axes that split the first dim of a field of the batch, outermost first,
    before a rank does anything else with it. What counts a rank's rows ahead of the
    loop has those of all microbatches, see `passes.shard.count_rows`."""
    axes: list[str] = []
    names = {field.name}
    while True:
        readers = [n for n in s.nodes if any(v.name in names for v in n.operands)]
        if any(_splits_rows(n) and n.arg("axes") == TIME for n in readers):
            readers = [
                n for n in readers if not _splits_rows(n) or n.arg("axes") == TIME
            ]
        over = {n.arg("axes") for n in readers if _splits_rows(n)}
        if len(over) != 1 or not all(map(_splits_rows, readers)):
            return tuple(axes)
        axes += over
        names = {v.name for n in readers for v in n.results}


def _splits_rows(node: Node) -> bool:
    return node.op == "comm.shard" and node.arg("dim") == 0


def _entries(values: Sequence[Value]) -> str:
    """The entries of a table of shapes by name: layers that are alike are one
    comprehension, at the place of the first."""
    lines: list[str] = []
    for (prefix, rows), numbers in _alike(values).items():
        if len(numbers) < 2:
            start = "".join(f"{prefix}+{n}." for n in numbers)
            lines += [f'    "{start}{name}": {row},' for name, row in rows]
            continue
        lines += [
            "    **{",
            f'        f"{prefix}+{{i}}.{{name}}": row',
            f"        for {loop_text(numbers)}",
            "        for name, row in {",
            *(f'            "{name}": {row},' for name, row in rows),
            "        }.items()",
            "    },",
        ]
    return "\n".join(["{", *lines, "}"]) if lines else "{}"


def _families(values: Mapping[str, Value]) -> str:
    """A table of shapes by key; keys that differ in a layer's number are one
    comprehension."""
    series: dict[tuple[str, str], list[int]] = {}
    lines = []
    for key, v in values.items():
        stem, _, number = key.rpartition(".")
        row = f"({v.shape}, {v.dtype})"
        if stem:
            series.setdefault((stem, row), []).append(int(number))
        else:
            lines.append(f'    "{key}": {row},')
    for (stem, row), numbers in series.items():
        lines.append(f'    **{{f"{stem}.{{i}}": {row} for {loop_text(numbers)}}},')
    return "\n".join(["{", *lines, "}"]) if lines else "{}"


def _alike(
    values: Sequence[Value],
) -> dict[tuple[str, tuple[tuple[str, str], ...]], list[int]]:
    """(path before a layer, rows) -> the numbers of the layers that have these rows, of
    name in the layer and shape. What is in no such layer has no number."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[int]] = {}
    for (path, number), own in groupby(values, key=lambda v: _layer(v.name)):
        start = 0 if number is None else len(f"{path}+{number}.")
        rows = ((v.name[start:], f"({v.shape}, {v.dtype})") for v in own)
        numbers = groups.setdefault((path, tuple(rows)), [])
        numbers += [] if number is None else [number]
    return groups


def _layer(name: str) -> tuple[str, int | None]:
    match = LAYER.search(name)
    if match is None or not match[1].startswith("+"):
        return "", None
    return name[: match.start()], int(match[1])
