"""An emitted module as statements: what each makes, of which dims, from which line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.passes.graph import bare
from autopar.passes.ops.op import OPS

SOURCE = re.compile(r"([\w.-]+\.py):(\d+)$")
# What lays a tensor out otherwise and computes nothing.
VIEWS = {bare(name) for name, op in OPS.items() if op.view}


@dataclass(frozen=True)
class Dims:
    """One tensor: `[batch/time, seq/tp, embed] +tp`. parts: of each tensor dim;
    pending: axes over which it is still to be summed, or `max:tp`."""

    text: str
    parts: tuple[str, ...]
    pending: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Dims:
        """Reads a comment's `[batch/dp, seq] +tp`."""
        inner, _, after = text[1:].partition("]")
        parts = tuple(p.strip() for p in inner.split(",")) if inner.strip() else ()
        return cls(text, parts, tuple(after.split()))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that split it, in the order of its dims, without time."""
        axes = re.findall(r"/(\w+)", " ".join(self.parts))
        return tuple(a for a in dict.fromkeys(axes) if a != "time")


@dataclass(frozen=True)
class Statement:
    """A line of an emitted function.

    line: of the module's text, from 1. targets: names that it assigns. ops: what it
    calls, first to last. dims: of the distinct tensors that it makes. source: file and
    line of the model. loop: the line of the loop it is in. calls: the outlined function
    that it calls. kind, axes: of a collective; operand: what is given to it.
    base: the name that a view is of. reads: names, and
    entries of p and b, that it is made of.
    """

    function: str
    line: int
    code: str
    targets: tuple[str, ...]
    ops: tuple[str, ...]
    dims: tuple[Dims, ...]
    source: tuple[str, int] | None
    module: str
    loop: int | None
    calls: str = ""
    kind: str = ""
    axes: tuple[str, ...] = ()
    operand: str = ""
    base: str = ""
    reads: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The op that computes; of a view, or what moves parts, that one."""
        own = [op for op in self.ops if op.rstrip("_") not in VIEWS]
        return (own or [*self.ops, "copy"])[0]

    @property
    def is_view(self) -> bool:
        return not self.kind and all(op.rstrip("_") in VIEWS for op in self.ops)


@dataclass(frozen=True)
class Loop:
    """for i in range(first, last): of a function."""

    line: int
    iterations: tuple[int, ...]


@dataclass(frozen=True)
class Module:
    """functions: name -> its statements, in order. loops: line -> the loop there.
    arguments, returns: name -> what the function is given, and returns. kept: names of
    what forward's loops put into a row for the backward, by the line of the loop.
    gathered: dims of what prologue makes."""

    text: str
    functions: dict[str, list[Statement]]
    loops: dict[int, Loop]
    arguments: dict[str, tuple[str, ...]]
    returns: dict[str, tuple[str, ...]]
    kept: dict[int, list[str]]
    gathered: tuple[Dims, ...]

    def maker(self, function: str, name: str) -> Statement | None:
        """The statement that makes a value, in the function that it is outlined to."""
        for s in self.functions.get(function, ()):
            if name not in s.targets:
                continue
            if not s.calls:
                return s
            inner = self.maker(s.calls, self.returns[s.calls][s.targets.index(name)])
            return inner and replace(inner, module=in_layer(inner.module, s.module))
        return None

    def expanded(self, function: str) -> Iterator[Statement]:
        """Statements in the order in which they run, outlined functions in place of
        their calls; of a loop once. The layer is the caller's."""
        for s in self.functions.get(function, ()):
            if not s.calls:
                yield s
                continue
            operands = dict(zip(self.arguments[s.calls], s.reads, strict=False))
            for inner in self.functions[s.calls]:
                yield replace(
                    inner,
                    module=in_layer(inner.module, s.module),
                    loop=s.loop,
                    reads=tuple(operands.get(name, name) for name in inner.reads),
                )


def in_layer(module: str, caller: str) -> str:
    """`blocks.*.mlp` of what is called from `blocks.+i.attention`: `blocks.+i.mlp`;
    from outside of layers it is the caller's."""
    parts, there = module.split("."), caller.split(".")
    if "*" not in parts:
        return module
    cut = parts.index("*") + 1
    if len(there) < cut or there[: cut - 1] != parts[: cut - 1]:
        return caller
    return ".".join([*there[:cut], *parts[cut:]])


def read_module(text: str) -> Module:
    """Parses an emitted module into statements, loops, arguments and results by
    function."""
    lines = text.splitlines()
    functions: dict[str, list[Statement]] = {}
    loops: dict[int, Loop] = {}
    tree = ast.parse(text)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            reader = _Reader(node.name, lines, defined, loops)
            functions[node.name] = [*reader.read(node.body, None)]
    by_name = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    returns = {name: _returned(node) for name, node in by_name.items()}
    kept = dict(_rows(by_name["forward"])) if "forward" in by_name else {}
    arguments = {n: tuple(a.arg for a in f.args.args) for n, f in by_name.items()}
    own = by_name.get("prologue")
    above = lines[own.lineno : own.end_lineno] if own else []
    gathered = tuple(
        d for line in above for d in _comment(line.partition("  # ")[2])[0]
    )
    return Module(text, functions, loops, arguments, returns, kept, gathered)


def _returned(function: ast.FunctionDef) -> tuple[str, ...]:
    last = function.body[-1] if function.body else None
    if isinstance(last, ast.Return) and last.value is not None:
        return _names(last.value)
    return ()


def _rows(function: ast.FunctionDef) -> Iterator[tuple[int, list[str]]]:
    """(line of a loop, names in `rows[i] = [...]` and `rows[i] += [...]`)."""
    for loop in ast.walk(function):
        if not isinstance(loop, ast.For):
            continue
        names: list[str] = []
        for node in (inner for top in loop.body for inner in ast.walk(top)):
            if isinstance(node, ast.AugAssign) or (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Subscript)
                and isinstance(node.value, ast.List)
            ):
                names += _names(node.value)
        yield loop.lineno, names


@dataclass
class _Reader:
    function: str
    lines: list[str]
    defined: set[str]
    loops: dict[int, Loop]

    def read(self, body: list[ast.stmt], loop: int | None) -> Iterator[Statement]:
        for node in body:
            if isinstance(node, ast.For):
                self.loops[node.lineno] = Loop(node.lineno, _iterations(node.iter))
                yield from self.read(node.body, node.lineno)
            elif isinstance(node, ast.If):
                yield from self.read([*node.body, *node.orelse], loop)
            elif isinstance(node, ast.Assign | ast.Expr):
                read = self.statement(node, loop)
                if read is not None:
                    yield read

    def statement(
        self, node: ast.Assign | ast.Expr, loop: int | None
    ) -> Statement | None:
        """None for what moves names about."""
        chain = _chain(node.value)
        if not chain:
            return None
        targets = _names(node.targets[0]) if isinstance(node, ast.Assign) else ()
        code, _, comment = self.lines[node.lineno - 1].partition("  # ")
        dims, source, module = _comment(comment)
        head = chain[0]
        ops = tuple(_op(call) for call in chain)
        if ops[0] in ("clear", "pop", "ready", "rows") or ops == ("wait",):
            return None
        read = Statement(
            self.function, node.lineno, code.strip(), targets, ops, dims, source,
            module, loop, reads=tuple(_reads(node.value)),
        )  # fmt: skip
        if read.is_view and targets:
            inner = head.func.value if isinstance(head.func, ast.Attribute) else head
            read = replace(read, base=ast.unparse(inner))
        if isinstance(head.func, ast.Name) and head.func.id in self.defined:
            return replace(read, calls=head.func.id)
        kind = _kind(head)
        if kind:
            operand, over = head.args[0], head.args[1]
            axes = ast.literal_eval(over)
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            read = replace(read, kind=kind, axes=axes, operand=ast.unparse(operand))
        return read


def _reads(node: ast.expr) -> Iterator[str]:
    """`x`, `p[f"blocks.+{i}.norm1.weight"]`, in the order in which they stand."""
    if isinstance(node, ast.Subscript):
        yield ast.unparse(node)
    elif isinstance(node, ast.Name):
        if node.id not in ("c", "F", "aten", "torch", "kernels", "inf", "k"):
            yield node.id
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            yield from _reads(node.func)
        for arg in node.args:
            yield from _reads(arg)
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _reads(child)


def _chain(node: ast.expr) -> list[ast.Call]:
    """`f(x).g().h()` -> [f, g, h]"""
    calls: list[ast.Call] = []
    while isinstance(node, ast.Call):
        calls.append(node)
        inner = node.func
        node = inner.value if isinstance(inner, ast.Attribute) else inner
    return calls[::-1]


def _op(call: ast.Call) -> str:
    """`linear` of `F.linear(x)`, `gelu` of `aten.gelu.default(x)`."""
    if not isinstance(call.func, ast.Attribute):
        return ast.unparse(call.func)
    path = ast.unparse(call.func).split(".")
    if path[0] == "aten" and len(path) == 3:
        return path[1]
    if path[:2] == ["torch", "ops"] and len(path) == 5:
        return path[3]
    return call.func.attr


def _kind(call: ast.Call) -> str:
    """The kind of data that a call moves over axes of the mesh; "" for none."""
    if not (isinstance(call.func, ast.Attribute) and len(call.args) > 1):
        return ""
    if ast.unparse(call.func.value) != "c":
        return ""
    op = OPS.get(f"comm.{call.func.attr}")
    return op.kind if op is not None else ""


def _names(node: ast.expr) -> tuple[str, ...]:
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(name for item in node.elts for name in _names(item))
    return (ast.unparse(node),)


def _comment(text: str) -> tuple[tuple[Dims, ...], tuple[str, int] | None, str]:
    dims, source, module = [], None, ""
    for part in filter(None, text.strip().split("  ")):
        if part.startswith("["):
            dims.append(Dims.parse(part))
        elif match := SOURCE.match(part):
            source = match[1], int(match[2])
        else:
            module = part
    return tuple(dims), source, module


def _iterations(node: ast.expr) -> tuple[int, ...]:
    """Returns the numbers of range(...) or reversed(range(...)), ascending."""
    assert isinstance(node, ast.Call), "loops run over ranges"
    if isinstance(node.func, ast.Name) and node.func.id == "reversed":
        return _iterations(node.args[0])
    return tuple(sorted(range(*(ast.literal_eval(a) for a in node.args))))
