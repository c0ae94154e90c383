"""The statements of an emitted module, and what is known where each of them stands.

For mutants of text: one statement of a module, changed as a fault would. `Mutate` takes
a statement and yields what it could be instead, as lines of text; `None` stands for no
line at all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

TABLE = re.compile(r"\b([a-z]|made)\[(f?)'([^']*)'\]")
DIMS = re.compile(r"#.*?(\[[^\]]*\])")
NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
ALIKE = ("torch.split", "aten.unbind.int", "torch.unbind", "torch.chunk")


@dataclass(frozen=True)
class Place:
    """A statement of a module, or the first line of one, and what is known there.

    statement: of the line alone. line: as it is written, without its comment. function:
    "" for declarations. axes: the mesh's, with sizes. like: name -> others of the same
    dims that are there. there: all names. results: pairs of those it gives that have
    the same dims. parameters: name -> shape. later: names that are read after it. loop:
    what `i` is, in turn. parts: outlined functions -> how many arguments and results.
    """

    statement: ast.stmt
    line: str
    function: str
    axes: dict[str, int]
    like: dict[str, list[str]]
    there: frozenset[str]
    results: list[tuple[int, int]]
    parameters: dict[str, str]
    later: frozenset[str]
    loop: tuple[int, ...]
    parts: dict[str, tuple[int, int]]


Mutate = Callable[[Place], Iterator[str | None]]
Dims = list[str | None]


def places(text: str, axes: dict[str, int]) -> Iterator[Place]:
    """Every statement of a module, one line each."""
    reader = _Reader(text, axes)
    list(reader.places())  # tells of what dims arguments of functions are
    yield from reader.places()


class _Reader:
    def __init__(self, text: str, axes: dict[str, int]) -> None:
        self.lines, self.tree, self.axes = text.split("\n"), ast.parse(text), axes
        self.parameters = _parameters(self.tree)
        self.functions = {
            f.name: f for f in self.tree.body if isinstance(f, ast.FunctionDef)
        }
        self.parts = {
            name: (len(f.args.args), len(returned(f.body[-1])))
            for name, f in self.functions.items()
            if not f.args.args or f.args.args[0].arg != "c"
        }
        self.given: dict[str, Dims] = {}
        self.returned: dict[str, Dims] = {}
        self.rows: dict[str, Dims] = {}
        self.residuals: list[str] = []

    def places(self) -> Iterator[Place]:
        first = min(f.lineno for f in self.functions.values())
        self.dims: dict[str, str] = {}
        self.there: set[str] = set()
        self.last: dict[str, int] = {}
        for line in self.lines[: first - 1]:
            if NUMBER.search(line) and line.startswith((" ", "WHOLE", "BUFFERS")):
                yield self.place("", ast.Pass(), bare(line), 0, ())
        for name, function in self.functions.items():
            names = [a.arg for a in function.args.args]
            self.there, self.last = set(names), _last_reads(function)
            self.dims = _known(names, self.given.get(name, ()))
            line = bare(self.lines[function.lineno - 1])
            head = ast.parse(f"{line} pass").body[0]
            yield self.place(name, head, line, function.lineno, ())
            yield from self.body(name, function.body, ())

    def body(
        self, name: str, statements: Sequence[ast.stmt], loop: tuple[int, ...]
    ) -> Iterator[Place]:
        for statement in statements:
            self.remark = self.lines[statement.lineno - 1]
            line = bare(self.remark)
            if isinstance(statement, ast.For | ast.If):
                inner = loop
                if isinstance(statement, ast.For):
                    inner = tuple(eval(ast.unparse(statement.iter)))
                head = ast.parse(f"{line} pass").body[0]
                yield self.place(name, head, line, statement.lineno, inner)
                yield from self.body(name, statement.body, inner)
            elif statement.lineno == statement.end_lineno:
                alone = ast.parse(line).body[0]
                yield self.place(name, alone, line, statement.lineno, loop)
                self.learn(name, statement)

    def place(
        self,
        function: str,
        statement: ast.stmt,
        line: str,
        at: int,
        loop: tuple[int, ...],
    ) -> Place:
        like = {
            name: [n for n, d in self.dims.items() if d == own and n != name]
            for name, own in self.dims.items()
        }
        later = frozenset(name for name, last in self.last.items() if last > at)
        there = frozenset(self.there)
        dims = self.results(statement)[1] if isinstance(statement, ast.Assign) else []
        pairs = combinations(range(len(dims)), 2)
        results = [(i, j) for i, j in pairs if dims[i] and dims[i] == dims[j]]
        known = (like, there, results, self.parameters, later, loop, self.parts)
        return Place(statement, line, function, self.axes, *known)

    def learn(self, function: str, statement: ast.stmt) -> None:
        """What dims its results are of, and those of other functions."""
        if isinstance(statement, ast.Delete):
            for gone in statement.targets:
                self.dims.pop(ast.unparse(gone), None)
                self.there.discard(ast.unparse(gone))
        for call in calls(statement):
            name = ast.unparse(call.func)
            if name in self.parts:
                self.given[name] = self.of(call.args)
        if isinstance(statement, ast.Return):
            self.returned[function] = self.of(returned(statement))
            for part in returned(statement):
                if isinstance(part, ast.List):
                    self.residuals = [ast.unparse(x) for x in part.elts]
                    self.rows["residuals"] = self.of(part.elts)
        if isinstance(statement, ast.AugAssign) and isinstance(
            statement.value, ast.List
        ):
            self.rows[_root(statement.target)] += self.of(statement.value.elts)
        if isinstance(statement, ast.Assign):
            self.assign(statement)

    def assign(self, statement: ast.Assign) -> None:
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Subscript):
            if isinstance(value, ast.List):
                self.rows[_root(target)] = self.of(value.elts)
            return
        names, own = self.results(statement)
        if ast.unparse(value) == "residuals":
            for name, source in zip(names, self.residuals, strict=False):
                self.rows[name] = self.rows.get(source, [])
        for name in names:
            self.dims.pop(name, None)
        self.dims |= _known(names, own)
        self.there |= {*names}

    def results(self, statement: ast.Assign) -> tuple[list[str], Dims]:
        """The names that it gives, and their dims where they are known."""
        target, value = statement.targets[0], statement.value
        several = isinstance(target, ast.Tuple | ast.List)
        names = [ast.unparse(t) for t in (target.elts if several else [target])]
        found = DIMS.search(self.remark)
        if isinstance(value, ast.Name):
            alias = [self.dims.get(value.id)]
            kept = value.id == "residuals"
            return names, self.rows.get("residuals", []) if kept else alias
        call = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if call in self.parts:
            return names, self.returned.get(call, [])
        if call.endswith(".pop"):
            return names, self.rows.get(call.removesuffix(".pop"), [])
        known = found is not None and (not several or call in ALIKE)
        return names, [found[1]] * len(names) if known else []

    def of(self, values: Iterable[ast.expr]) -> Dims:
        return [self.dims.get(ast.unparse(v)) for v in values]


def _known(names: Sequence[str], dims: Sequence[str | None]) -> dict[str, str]:
    return {n: d for n, d in zip(names, dims, strict=False) if d is not None}


def _root(node: ast.expr) -> str:
    return ast.unparse(node).partition("[")[0]


def _last_reads(function: ast.FunctionDef) -> dict[str, int]:
    """Name -> the last line that reads it; the end of a loop, for what a later
    iteration reads as well."""
    found: dict[str, int] = {}

    def read(statements: Sequence[ast.stmt], loop: int, made: set[str]) -> None:
        for one in statements:
            if isinstance(one, ast.For):
                assert one.end_lineno is not None, "it was read from a text"
                read(one.body, one.end_lineno, set())
            elif isinstance(one, ast.If):
                read(one.body, loop, made)
            elif not isinstance(one, ast.Delete):
                names = [n for n in ast.walk(one) if isinstance(n, ast.Name)]
                for name in names:
                    if isinstance(name.ctx, ast.Load):
                        at = loop if loop and name.id not in made else one.lineno
                        found[name.id] = max(at, found.get(name.id, 0))
                made |= {n.id for n in names if isinstance(n.ctx, ast.Store)}

    read(function.body, 0, set())
    return found


def _parameters(tree: ast.Module) -> dict[str, str]:
    """Name -> shape and dtype, as the module itself has them."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "PARAMETERS"
        ):
            made = eval(ast.unparse(node.value), {"torch": torch})
            return {name: str(row) for name, row in made.items()}
    return {}


def returned(statement: ast.stmt) -> list[ast.expr]:
    """What a function returns, one by one."""
    if not isinstance(statement, ast.Return) or statement.value is None:
        return []
    value = statement.value
    return value.elts if isinstance(value, ast.Tuple) else [value]


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """As ast.walk, but not into texts with expressions: these have no offsets; nor into
    what tells when to go on, which changes no value."""
    if isinstance(node, ast.Yield):
        return
    yield node
    for child in () if isinstance(node, ast.JoinedStr) else ast.iter_child_nodes(node):
        yield from walk(child)


def replaced(place: Place, old: ast.AST, new: str) -> str:
    """The line with one of the statement's expressions written otherwise."""
    assert isinstance(old, ast.expr), "an expression"
    assert old.end_col_offset is not None, "it was read from a text"
    line = place.line
    return line[: old.col_offset] + written(new) + line[old.end_col_offset :]


def written(code: str) -> str:
    """As emitted modules are: tables have their keys in double quotes."""
    return TABLE.sub(r'\1[\2"\3"]', code)


def calls(found: Place | ast.AST, *names: str) -> Iterator[ast.Call]:
    """The calls in a statement of functions or methods so named (any, if none)."""
    for node in walk(found.statement if isinstance(found, Place) else found):
        if isinstance(node, ast.Call) and (not names or called(node) in names):
            yield node


def called(call: ast.Call) -> str:
    """`c.all_reduce`, `aten.add.Tensor`; of a method of a value `.reshape`."""
    name = ast.unparse(call.func)
    root = name.split(".")[0]
    if root in ("c", "aten", "kernels", "F", "torch"):
        return name
    return "." + name.rpartition(".")[2]


def arguments(call: ast.Call) -> list[str]:
    return [ast.unparse(a) for a in call.args]


def is_collective(call: ast.Call) -> bool:
    return called(call) in COLLECTIVES


COLLECTIVES = (
    "c.all_reduce", "c.all_gather", "c.reduce_scatter", "c.all_to_all",
    "c.start_gather", "c.start_scatter",
)  # fmt: skip


def bare(line: str) -> str:
    """Without indentation and comment."""
    return line.partition("  # ")[0].strip()


def with_line(text: str, function: str, old: str, new: str | None) -> str:
    """The text with a line of a function ("": of the declarations) written otherwise,
    wherever it is; its comment stays."""
    lines, inside = [], ""
    for line in text.split("\n"):
        if line.startswith("def "):
            inside = line[4:].partition("(")[0]
        if bare(line) != old or inside != function:
            lines.append(line)
        elif new is not None:
            lines.append(line.replace(old, written(new), 1))
    return "\n".join(lines)
