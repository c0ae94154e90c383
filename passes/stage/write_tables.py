"""write_tables: what an executor must know of an emitted module before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from ..graph import LAYER, Node, Value
from ..mesh import TIME
from ..stage.local_stage import LocalStage


def tables(s: LocalStage, wholes: Mapping[str, Value]) -> str:
    """What the executor must know: local shapes of what comes in and goes out.

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
    """A table of shapes by name: layers that are alike by one comprehension."""
    lines: list[str] = []
    for (prefix, numbers), own in _alike(values):
        rows = [f'"{name}": ({v.shape}, {v.dtype}),' for name, v in own]
        if len(numbers) < 2:
            lines += ["    " + row for row in rows]
            continue
        lines += [
            "    **{",
            f'        f"{prefix}.+{{i}}.{{name}}": row',
            f"        for i in {_range(numbers[0], numbers[-1])}",
            "        for name, row in {",
            *("            " + row for row in rows),
            "        }.items()",
            "    },",
        ]
    return "\n".join(["{", *lines, "}"]) if lines else "{}"


def _families(values: Mapping[str, Value]) -> str:
    """A table of shapes by key: those that differ in the number of a layer by one
    comprehension, unless some between them are frozen."""
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
        lines += [
            f'    **{{f"{stem}.{{i}}": {row} for i in {_range(*run)}}},'
            for run in _even(sorted(numbers))
        ]
    return "\n".join(["{", *lines, "}"]) if lines else "{}"


def _even(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first, last, step) of what stands at even distances in ascending numbers."""
    at = 0
    while at < len(numbers):
        steps = [after - n for n, after in pairwise(numbers[at : at + 3])]
        step = steps[0] if steps and steps[0] <= steps[-1] else 1
        first = last = numbers[at]
        while at < len(numbers) and numbers[at] == last:
            at, last = at + 1, last + step
        yield first, last - step, step


def _range(first: int, last: int, step: int = 1) -> str:
    """The numbers from the first up to the last, as an expression."""
    if step != 1 and first != last:
        return f"range({first}, {last + 1}, {step})"
    return f"range({first}, {last + 1})" if first else f"range({last + 1})"


def _alike(
    values: Sequence[Value],
) -> list[tuple[tuple[str, list[int]], list[tuple[str, Value]]]]:
    """((path of layers, their numbers), rows) of neighbours that have equal rows, named
    within the layer; what is in no such layer is by itself."""
    groups: list[tuple[tuple[str, list[int]], list[tuple[str, Value]]]] = []
    layers = groupby(values, key=lambda v: _layer(v.name))
    for (path, number), group in layers:
        own = list(group)
        if number is None:
            groups.append((("", []), [(v.name, v) for v in own]))
            continue
        start = len(f"{path}.+{number}.")
        rows = [(v.name[start:], v) for v in own]
        if groups and groups[-1][0][0] == path and groups[-1][0][1][-1] == number - 1:
            before = [(name, v.shape, v.dtype) for name, v in groups[-1][1]]
            if before == [(name, v.shape, v.dtype) for name, v in rows]:
                groups[-1][0][1].append(number)
                continue
        groups.append(((path, [number]), rows))
    return [
        (key, rows if len(key[1]) != 1 else [(v.name, v) for _, v in rows])
        for key, rows in groups
    ]


def _layer(name: str) -> tuple[str, int | None]:
    match = LAYER.search(name)
    if match is None or not match[1].startswith("+"):
        return "", None
    return name[: match.start() - 1], int(match[1])
