"""The model as its ranks run it: layers as rows, ops as cells in the order of data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from autopar.passes.capture.forward.on_meta import Shapes
from autopar.passes.graph import LAYER
from autopar.passes.program import ParameterSpec, Program
from autopar.reports.html.observe import Made, Seen, observe
from autopar.reports.html.statements import Dims, Module, Statement, read_module
from autopar.reports.inspection import first_rank

PHASES = {
    "forward": ("forward",),
    "backward": ("backward", "backward_input", "backward_weight"),
    "once a step": ("setup", "prologue", "epilogue"),
}
FACTOR = re.compile(r"([A-Za-z_]\w*|\d+)((?:/\w+)*)")
PARAMETER = re.compile(r"""^[pg]\[f?["'](.+)["']\]$""")


# Dropout's masks are numbered through all stages: in the call, and in names.
MASK = re.compile(r"(c\.(?:dropout_counters\(|draw\([^,]+, ))[^,]+")
NUMBERED = re.compile(r"\b([a-z_]+)_(\d+)\b")


def model_data(program: Program) -> dict[str, Any]:
    """stages: which module the first rank of each runs, under which key its ops are
    told, and its layers. modules: key -> rows of cells by phase, as one rank sees them;
    equal layers are one row, and stages whose modules differ in names alone share it.
    """
    shapes, modules = Shapes(), dict[str, Any]()
    stages, alike = [], dict[str, str]()
    for index in range(len(program.stages)):
        rank = first_rank(program, index)
        key = program.module_of(rank, index)
        shape = _shape(program.modules[key])
        if shape not in alike:
            alike[shape] = key
            module = read_module(program.modules[key])
            seen = observe(program, index, rank, module, shapes)
            modules[key] = _Grid(program, index, module, seen).data()
        stages.append(
            {
                "module": key,
                "view": alike[shape],
                "rank": rank,
                "pipeline_rank": program.schedule.stage_to_rank[index],
                "numbers": _numbers(program, index),
            }
        )
    return {"stages": stages, "modules": modules}


def _shape(text: str) -> str:
    """A module's text with its names numbered as they come."""
    names: dict[str, str] = {}

    def renumbered(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"{match[1]}_n{len(names)}")

    return NUMBERED.sub(renumbered, MASK.sub(r"\1N", text))


def _numbers(program: Program, stage: int) -> dict[str, str]:
    """`blocks.+0` of a module -> `blocks.4` of the model."""
    numbers = {}
    for own, name in program.stages[stage].names.items():
        match = LAYER.search(own)
        real = LAYER.search(name)
        if match and real and match[1].startswith("+"):
            numbers[own[: match.end()]] = name[: real.end()]
    return numbers


@dataclass
class _Grid:
    program: Program
    stage: int
    module: Module
    seen: Seen

    def data(self) -> dict[str, Any]:
        names = self.program.stages[self.stage].names
        self.specs = {
            own: self.program.tensors[name]
            for own, name in names.items()
            if name in self.program.tensors
        }
        self.extents = _extents(self.program.tensors)
        return {
            "rows": {
                phase: [row for f in functions for row in self.rows(f)]
                for phase, functions in PHASES.items()
            },
            "residuals": self.residuals(),
            "peaks": {
                name: {"line": line, "bytes": sum(n for _, n in alive), "alive": alive}
                for name, (line, alive) in self.seen.peaks.items()
            },
            "stopped": self.seen.stopped,
        }

    def rows(self, function: str) -> Iterator[dict[str, Any]]:
        """Neighbours of the same layer, or of none, are a row."""
        row: dict[str, Any] = {}
        key: tuple[object, ...] = ()
        dims: dict[str, Dims] = {}
        for s in self.module.expanded(function):
            layer = _layer(s.module)
            own: tuple[object, ...] = (s.loop, layer if s.loop is None else "")
            if s.loop is None and not s.module and row:
                own = key  # what belongs to no module stays where it is
            if own != key or not row:
                if row:
                    yield row
                key = own
                row = {**self.row(function, s, layer), "cells": []}
            if name := s.module.split(".")[-1 if not layer else 0]:
                row["modules"].setdefault(name, None)
            row["cells"].append(self.cell(s, dims))
        if row:
            yield row

    def row(self, function: str, s: Statement, layer: str) -> dict[str, Any]:
        loop = self.module.loops.get(s.loop or -1)
        row: dict[str, Any] = {"layer": layer, "count": 1, "modules": {}}
        if loop is not None:
            stem = layer.rpartition(".")[0]
            step = [f"{stem}.+{i}" for i in loop.iterations] if "+" in layer else []
            row |= {"count": len(loop.iterations), "layers": step}
        return {**row, "function": function}

    def cell(self, s: Statement, dims: dict[str, Dims]) -> dict[str, Any]:
        reads = [text for read in s.reads if (text := self.pattern(read, dims))]
        made = {n: m for n in s.targets if (m := self.seen.made.get((s.line, n)))}
        for name in s.targets:
            fitting = self.fitting(s.dims, made.get(name))
            if fitting is not None:
                dims[name] = fitting
        main = s.dims[0] if s.dims else None
        cell: dict[str, Any] = {
            "op": s.kind or s.name.rstrip("_"),
            "ops": list(s.ops),
            "line": s.line,
            "dims": [d.text for d in s.dims],
            "axes": list(main.axes) if main else [],
            "pending": list(main.pending) if main else [],
            "reads": reads,
            "module": s.module,
            "out": [
                [name, list(m.shape), self.whole(s.dims, m), m.dtype, m.bytes]
                for name, m in made.items()
            ],
        }
        if s.source:
            cell["source"] = list(s.source)
        if s.kind:
            cell |= {"kind": s.kind, "over": list(s.axes)}
            cell["given"] = self.seen.brought.get(s.line)
        if s.is_view:
            cell["view"] = True
        return cell

    def pattern(self, read: str, dims: Mapping[str, Dims]) -> str:
        """The named dims of an operand; "" if it is no tensor."""
        if read in dims:
            return " ".join(dims[read].parts)
        if match := PARAMETER.match(read):
            name = match[1].replace("{i}", "0").replace("{", "").replace("}", "")
            spec = self.specs.get(name)
            return spec.pattern if spec else ""
        made = self.seen.read.get(read)
        dims_read = self.fitting(self.module.gathered, made)
        return " ".join(dims_read.parts) if dims_read else ""

    def whole(self, dims: tuple[Dims, ...], made: Made) -> list[int] | None:
        """The shape without splits: of named dims, or as many times as there are
        ranks; None where nothing names the dims."""
        dims_of = self.fitting(dims, made)
        if dims_of is None:
            return None
        pairs = zip(dims_of.parts, made.shape, strict=True)
        return [self.extent(part, n)[0] for part, n in pairs]

    def extent(self, part: str, local: int) -> tuple[int, bool]:
        """Returns the extent of an unsplit tensor dim, and whether the rank's share
        fits it."""
        factors = FACTOR.findall(part)
        known = [int(n) if n.isdigit() else self.extents.get(n, 0) for n, _ in factors]
        axes = [a for _, own in factors for a in own.split("/") if a]
        shares = prod(self.program.plan.size(a) for a in axes)
        if not all(known):
            return local * shares, True
        whole = prod(known)
        return whole, shares * (local - 1) < whole <= shares * local

    def fitting(self, dims: tuple[Dims, ...], made: Made | None) -> Dims | None:
        """The dims of a tensor among those of a statement's results."""
        for own in dims if made else ():
            assert made is not None, "something was made"
            if len(own.parts) == len(made.shape):
                pairs = zip(own.parts, made.shape, strict=True)
                if all(self.extent(part, n)[1] for part, n in pairs):
                    return own
        return None

    def first_made(self, s: Statement) -> Made | None:
        return next(
            (m for t in s.targets if (m := self.seen.made.get((s.line, t)))), None
        )

    def residuals(self) -> list[dict[str, Any]]:
        """The residuals of one microbatch, the largest first."""
        residuals = []
        for name, (many, total) in self.seen.residuals.items():
            s = self.module.maker("forward", name)
            source = list(s.source) if s and s.source else None
            made = self.first_made(s) if s else None
            dims = self.fitting(s.dims, made) if s else None
            residuals.append(
                {
                    "name": name,
                    "count": many,
                    "bytes": total,
                    "module": s.module if s else "",
                    "source": source,
                    "dims": dims.text if dims else "",
                }
            )
        return sorted(residuals, key=lambda row: -row["bytes"])


def _layer(module: str) -> str:
    """`blocks.+i` for `blocks.+i.mlp`; "" outside of layers."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.lstrip("+").isdigit() or re.fullmatch(r"\+?(i|\(i[+-]\d+\)|\*)", part):
            return ".".join(parts[: i + 1])
    return ""


def _extents(parameters: Mapping[str, ParameterSpec]) -> dict[str, int]:
    """Named dims of parameters -> their size, where it is one."""
    extents: dict[str, set[int]] = {}
    for spec in parameters.values():
        for sizes, names in zip(spec.factors, spec.dims, strict=True):
            for n, name in zip(sizes, names, strict=True):
                extents.setdefault(name, set()).add(n)
    return {name: min(sizes) for name, sizes in extents.items() if len(sizes) == 1}
