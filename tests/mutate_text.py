"""Mutants of emitted text: one statement of a module, changed as a fault would.

Each function takes a statement and yields what it could be instead, as lines of text;
`None` stands for no line at all. `KINDS` gives them names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch

TABLE = re.compile(r"\b([a-z]|made)\[(f?)'([^']*)'\]")
DIMS = re.compile(r"#.*?(\[[^\]]*\])")
INDEX = re.compile(r"(?<![\w.])i(?!\w)")
NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
MOST_INT = 1 << 30  # above it, an integer is "to the end"
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
            name: (len(f.args.args), len(_returned(f.body[-1])))
            for name, f in self.functions.items()
            if not f.args.args or f.args.args[0].arg != "c"
        }
        self.given: dict[str, Dims] = {}
        self.returned: dict[str, Dims] = {}
        self.rows: dict[str, Dims] = {}
        self.saved: list[str] = []

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
        """Of what dims its results are, and those of other functions."""
        if isinstance(statement, ast.Delete):
            for gone in statement.targets:
                self.dims.pop(ast.unparse(gone), None)
                self.there.discard(ast.unparse(gone))
        for call in calls(statement):
            name = ast.unparse(call.func)
            if name in self.parts:
                self.given[name] = self.of(call.args)
        if isinstance(statement, ast.Return):
            self.returned[function] = self.of(_returned(statement))
            for part in _returned(statement):
                if isinstance(part, ast.List):
                    self.saved = [ast.unparse(x) for x in part.elts]
                    self.rows["saved"] = self.of(part.elts)
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
        if ast.unparse(value) == "saved":
            for name, source in zip(names, self.saved, strict=False):
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
            return names, self.rows.get("saved", []) if value.id == "saved" else alias
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


def _returned(statement: ast.stmt) -> list[ast.expr]:
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


# --- collectives --------------------------------------------------------------------


def collective_dropped(place: Place) -> Iterator[str | None]:
    """Each rank goes on with what it has: a pending sum is taken as whole."""
    for call in calls(place, *COLLECTIVES[:4]):
        x, axis, *rest = arguments(call)
        n = place.axes.get(axis.strip("'"), 1)
        if called(call) == "c.all_reduce":
            yield replaced(place, call, f"{x}.clone()")
        if called(call) == "c.reduce_scatter":
            yield replaced(place, call, f"c.shard({x}, {axis}, {rest[0]}).clone()")
        if called(call) == "c.all_gather":
            yield replaced(place, call, f"torch.cat([{x}] * {n}, {rest[0]})")
        if called(call) == "c.all_to_all":
            own = f"c.shard({x}, {axis}, {rest[0]})"
            yield replaced(place, call, f"torch.cat([{own}] * {n}, {rest[1]})")


def collective_doubled(place: Place) -> Iterator[str | None]:
    for call in calls(place, "c.all_reduce", "c.reduce_scatter"):
        x, axis, *rest = arguments(call)
        axes = axis if axis.startswith("(") else f"({axis},)"
        op = rest[:1] if called(call) == "c.all_reduce" else []
        once = f"c.all_reduce({', '.join([x, axes, *op])})"
        given = ", ".join([once, axis, *rest])
        yield replaced(place, call, f"{called(call)}({given})")


def collective_on_another_axis(place: Place) -> Iterator[str | None]:
    for call in calls(place):
        if not called(call).startswith("c.") or called(call) == "c.wait":
            continue
        for node in walk(call):
            if isinstance(node, ast.Constant) and node.value in place.axes:
                for axis in place.axes:
                    if axis not in (node.value, "pp"):
                        yield replaced(place, node, repr(axis))


def collective_on_another_dim(place: Place) -> Iterator[str | None]:
    for call in calls(place, *COLLECTIVES, "c.shard"):
        for argument in call.args[2:]:
            for node in walk(argument):
                if isinstance(node, ast.Constant) and type(node.value) is int:
                    yield replaced(place, node, str(node.value + 1))
                    yield replaced(place, node, str(node.value - 1))


def max_for_sum(place: Place) -> Iterator[str | None]:
    for call in calls(place, "c.all_reduce"):
        x, axes, *rest = arguments(call)
        op = "'sum'" if rest[:1] == ["'max'"] else "'max'"
        yield replaced(place, call, f"c.all_reduce({x}, {axes}, {op})")


def part_of_another_rank(place: Place) -> Iterator[str | None]:
    """Of what all have whole, a rank takes what belongs to the one before it."""
    for call in calls(place, "c.shard"):
        x, axis, dim = arguments(call)
        n = place.axes.get(axis.strip("'"), 0)
        if n > 1:
            moved = f"{x}.roll(max(1, {x}.shape[{dim}] // {n}), {dim})"
            yield replaced(place, call, f"c.shard({moved}, {axis}, {dim})")


def share_off_by_one(place: Place) -> Iterator[str | None]:
    """Rows of a parameter, or of what a rank takes of a whole, are the next ones."""
    if place.function in ("setup", "prologue", "forward"):
        for node in walk(place.statement):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "p":
                yield replaced(place, node, f"{ast.unparse(node)}.roll(1, 0)")
    for call in calls(place, "c.shard"):
        x, axis, dim = arguments(call)
        yield replaced(place, call, f"c.shard({x}.roll(1, {dim}), {axis}, {dim})")


def microbatch_counted_twice(place: Place) -> Iterator[str | None]:
    for call in calls(place, "c.shard"):
        x, axis, dim = arguments(call)
        if axis == "'time'":
            moved = (
                f"{x}.roll(c.microbatch * ({x}.shape[{dim}] // c.microbatches), {dim})"
            )
            yield replaced(place, call, f"c.shard({moved}, {axis}, {dim})")


# --- numbers ------------------------------------------------------------------------


SCALED = (".mul_", ".div_", "torch.mul", "torch.div", ".mul", ".div")
WITH_SCALE = ("kernels.masked_scale", "kernels.attention", "c.attention")


def scale_lost(place: Place) -> Iterator[str | None]:
    for call in calls(
        place, ".mul_", ".div_", "torch.mul", "torch.div", ".mul", ".div"
    ):
        if isinstance(call.func, ast.Attribute) and called(call).startswith("."):
            yield replaced(place, call, ast.unparse(call.func.value))
        elif len(call.args) > 1:
            yield replaced(place, call, arguments(call)[0])
    for call in calls(
        place, "kernels.masked_scale", "kernels.attention", "c.attention"
    ):
        for node in call.args:
            if isinstance(node, ast.Constant) and type(node.value) is float:
                yield replaced(place, node, "1.0")


def constant_changed(place: Place) -> Iterator[str | None]:
    for call in calls(place):
        if is_collective(call) or called(call) == "c.shard":
            continue
        for argument in [*call.args, *(k.value for k in call.keywords)]:
            for node in walk(argument):
                if not isinstance(node, ast.Constant):
                    continue
                value = node.value
                if type(value) is bool:
                    yield replaced(place, node, str(not value))
                elif type(value) is int and abs(value) < MOST_INT:
                    yield replaced(place, node, str(value + 1))
                elif type(value) is float:
                    yield replaced(place, node, repr(value * 1.5 + 0.1))
                elif value == "tanh":
                    yield replaced(place, node, "'none'")


# --- values -------------------------------------------------------------------------

COMMUTE = {"aten.maximum.default", "torch.mul", "torch.add", ".add_", ".mul_"}


def operands_swapped(place: Place) -> Iterator[str | None]:
    for call in calls(place):
        given = arguments(call)
        tensors = [
            i
            for i, a in enumerate(call.args)
            if isinstance(a, ast.Name) or ast.unparse(a).startswith(("p[", "b[", "k["))
        ]
        if called(call) in COMMUTE or is_collective(call):
            continue
        for i, j in pairwise(tensors):
            swapped = list(given)
            swapped[i], swapped[j] = given[j], given[i]
            more = [f"{k.arg}={ast.unparse(k.value)}" for k in call.keywords]
            inside = ", ".join([*swapped, *more])
            yield replaced(place, call, f"{ast.unparse(call.func)}({inside})")


def results_swapped(place: Place) -> Iterator[str | None]:
    statement = place.statement
    if not isinstance(statement, ast.Assign):
        return
    target = statement.targets[0]
    if not isinstance(target, ast.Tuple | ast.List) or len(target.elts) < 2:
        return
    names = [ast.unparse(name) for name in target.elts]
    for i in range(len(names) - 1):
        swapped = [*names[:i], names[i + 1], names[i], *names[i + 2 :]]
        yield f"[{', '.join(swapped)}] = {ast.unparse(statement.value)}"


def another_value(place: Place) -> Iterator[str | None]:
    """One of the same dims."""
    if isinstance(place.statement, ast.Delete):
        return
    for node in walk(place.statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            for other in place.like.get(node.id, ())[-2:]:
                yield replaced(place, node, other)


def another_parameter(place: Place) -> Iterator[str | None]:
    """Of the same shape; in a loop, always that of one layer."""
    for node in walk(place.statement):
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            continue
        table = node.value.id
        if table not in ("p", "g"):
            continue
        if isinstance(node.slice, ast.Constant):
            name = own = node.slice.value
        else:
            name = ast.unparse(node.slice)[2:-1]
            own = eval(f'f"{name}"', {"i": place.loop[0]})
            yield replaced(place, node, f'{table}["{own}"]')
        before, layer, _ = re.split(r"(\{.*\}|$)", name, maxsplit=1)
        number = own[len(before) :].partition(".")[0] if layer else ""
        for other, kind in place.parameters.items():
            if other == own or kind != place.parameters.get(own):
                continue
            if not layer:
                yield replaced(place, node, f'{table}["{other}"]')
            elif other.startswith(f"{before}{number}."):
                rest = other[len(before) + len(number) :]
                yield replaced(place, node, f'{table}[f"{before}{layer}{rest}"]')


def live_value_overwritten(place: Place) -> Iterator[str | None]:
    """Its memory is used again while it is still needed."""
    if not isinstance(place.statement, ast.Assign | ast.Expr):
        return
    text = ast.unparse(place.statement)
    for node in walk(place.statement):
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
            continue
        if node.id in place.like and node.id in place.later:
            yield f"{text}; {node.id}.mul_(0.5)"
    for call in calls(place, ".add_"):
        assert isinstance(call.func, ast.Attribute)
        x, y = ast.unparse(call.func.value), arguments(call)[0]
        yield replaced(place, call, f"{y}.add_({x})")
    for call in calls(place, "torch.mul", "torch.add", "torch.neg"):
        x, *rest = arguments(call)
        if x.isidentifier() and x in place.later:
            name = called(call).removeprefix("torch.")
            yield replaced(place, call, f"{x}.{name}_({', '.join(rest)})")


# --- gradients, and what goes from one function to another ----------------------


def accumulation_dropped(place: Place) -> Iterator[str | None]:
    for call in calls(place):
        if called(call).endswith("_") and isinstance(place.statement, ast.Expr):
            yield None


def accumulation_doubled(place: Place) -> Iterator[str | None]:
    for call in calls(place):
        if called(call).endswith("_") and isinstance(place.statement, ast.Expr):
            text = ast.unparse(place.statement)
            yield f"{text}; {text}"


def residual_stale(place: Place) -> Iterator[str | None]:
    """What an earlier microbatch, or step, saved."""
    statement = place.statement
    kept: list[ast.expr] = []
    if isinstance(statement, ast.Return) and place.function not in place.parts:
        lists = (p for p in _returned(statement) if isinstance(p, ast.List))
        kept = [node for part in lists for node in part.elts]
    if isinstance(statement, ast.Assign | ast.AugAssign) and isinstance(
        statement.value, ast.List
    ):
        kept = statement.value.elts
    for node in kept:
        name = ast.unparse(node)
        key = f'f"old {name} {{i}}"' if place.loop else f'"old {name}"'
        yield replaced(place, node, f"k.setdefault({key}, {name})")


def batch_stale(place: Place) -> Iterator[str | None]:
    """What prologue made of an earlier batch."""
    if not isinstance(place.statement, ast.Assign) or place.function != "prologue":
        return
    target, value = place.statement.targets[0], place.statement.value
    if isinstance(target, ast.Subscript):
        name, made = ast.unparse(target).replace('"', "'"), ast.unparse(value)
        key = f'f"old {name} {{i}}"' if place.loop else f'"old {name}"'
        yield replaced(place, value, f"c.__dict__.setdefault({key}, {made})")


def message_wrong(place: Place) -> Iterator[str | None]:
    """What a stage hands on is lost, doubled, or in another order."""
    statement = place.statement
    if not isinstance(statement, ast.Return) or not isinstance(
        statement.value, ast.Tuple
    ):
        return
    outs = statement.value
    if outs.elts and isinstance(outs.elts[0], ast.Tuple):
        outs = outs.elts[0]
    tensors = [node for node in outs.elts if isinstance(node, ast.Name)]
    for node in tensors:
        yield replaced(place, node, f"{node.id} * 0")
        yield replaced(place, node, f"{node.id} * 2")
    names = [node.id for node in tensors]
    if len(names) > 1 and len(names) == len(outs.elts):
        swapped = [names[1], names[0], *names[2:]]
        yield replaced(place, outs, f"({', '.join(swapped)},)")


# --- loops, what they keep, and functions of a module's own ---------------------------


def of_another_iteration(place: Place) -> Iterator[str | None]:
    """What goes by the loop's variable is that of the next one, or of another."""
    count, low = len(place.loop), min(place.loop, default=0)
    if count < 2 or isinstance(place.statement, ast.For):
        return
    found = list(INDEX.finditer(place.line))
    for other in (
        f"((i - {low} + 1) % {count} + {low})",
        f"({2 * low + count - 1} - i)",
    ):
        for match in found:
            yield place.line[: match.start()] + other + place.line[match.end() :]
        if len(found) > 1:
            yield INDEX.sub(other, place.line)


def another_range(place: Place) -> Iterator[str | None]:
    """One iteration less or more, at either end; the other way round."""
    line, statement = place.line, place.statement
    if not isinstance(statement, ast.For | ast.If):
        return
    for match in NUMBER.finditer(line):
        for number in (int(match[0]) - 1, int(match[0]) + 1):
            yield f"{line[: match.start()]}{number}{line[match.end() :]}"
    if isinstance(statement, ast.If):
        yield f"if not ({line[3:-1]}):"
        yield "if True:"
        return
    over = ast.unparse(statement.iter)
    turned = over[9:-1] if over.startswith("reversed(") else f"reversed({over})"
    yield f"for i in {turned}:"
    yield f"for i in list({over})[1:]:"
    yield f"for i in list({over})[:-1]:"


def _pairs(place: Place, nodes: Sequence[ast.expr]) -> Iterator[tuple[int, int]]:
    """Those of the same dims."""
    names = [ast.unparse(node) for node in nodes]
    for i, j in combinations(range(len(names)), 2):
        if names[j] in place.like.get(names[i], ()):
            yield i, j


def _swapped(names: Sequence[str], i: int, j: int) -> str:
    own = list(names)
    own[i], own[j] = own[j], own[i]
    return ", ".join(own)


def row_of_other_values(place: Place) -> Iterator[str | None]:
    """What a loop keeps, or returns, in another order; or twice the same."""
    statement = place.statement
    if isinstance(statement, ast.Return) and place.function in place.parts:
        nodes = _returned(statement)
    elif isinstance(statement, ast.Assign | ast.AugAssign) and isinstance(
        statement.value, ast.List
    ):
        nodes = statement.value.elts
    else:
        return
    names = [ast.unparse(node) for node in nodes]
    text = ", ".join(names)
    for i, j in _pairs(place, nodes):
        yield place.line.replace(text, _swapped(names, i, j))
        twice = [*names[:j], names[i], *names[j + 1 :]]
        yield place.line.replace(text, ", ".join(twice))


def carried_value_lost(place: Place) -> Iterator[str | None]:
    """A name keeps what it had."""
    statement = place.statement
    if not isinstance(statement, ast.Assign):
        return
    for node in walk(statement.targets[0]):
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if stored and ast.unparse(node) in place.there:
            yield replaced(place, node, "_")


def part_given_others(place: Place) -> Iterator[str | None]:
    """Arguments of a function of the module in another order, or twice the same."""
    if isinstance(place.statement, ast.FunctionDef):
        names = [a.arg for a in place.statement.args.args]
        nodes = [ast.parse(name, mode="eval").body for name in names]
        for i, j in _pairs(place, nodes):
            yield f"def {place.function}({_swapped(names, i, j)}):"
    for call in calls(place, *(f".{name}" for name in place.parts)):
        given, name = arguments(call), ast.unparse(call.func)
        for i, j in _pairs(place, call.args):
            yield replaced(place, call, f"{name}({_swapped(given, i, j)})")
            yield replaced(place, call.args[i], given[j])


def part_gives_others(place: Place) -> Iterator[str | None]:
    """Results of a function of the module, or of a row, under each other's names."""
    statement = place.statement
    if not isinstance(statement, ast.Assign):
        return
    target, value = statement.targets[0], ast.unparse(statement.value)
    if not isinstance(target, ast.Tuple | ast.List):
        return
    names = [ast.unparse(name) for name in target.elts]
    for i, j in place.results:
        yield f"[{_swapped(names, i, j)}] = {value}"


def another_part(place: Place) -> Iterator[str | None]:
    """With as many arguments and results."""
    for call in calls(place, *(f".{name}" for name in place.parts)):
        own = ast.unparse(call.func)
        for other, kind in place.parts.items():
            if other != own and kind == place.parts[own]:
                yield replaced(place, call.func, other)


def declared_otherwise(place: Place) -> Iterator[str | None]:
    """A number more or less; a row left out."""
    if place.function:
        return
    for match in NUMBER.finditer(place.line):
        for number in (int(match[0]) + 1, int(match[0]) - 1):
            yield f"{place.line[: match.start()]}{number}{place.line[match.end() :]}"
    if place.line.endswith(","):
        yield None


KINDS: dict[str, Mutate] = {
    "collective dropped": collective_dropped,
    "collective doubled": collective_doubled,
    "collective on another axis": collective_on_another_axis,
    "collective on another dim": collective_on_another_dim,
    "max for sum, sum for max": max_for_sum,
    "part of another rank": part_of_another_rank,
    "share off by one": share_off_by_one,
    "microbatch counted twice": microbatch_counted_twice,
    "scale lost": scale_lost,
    "constant changed": constant_changed,
    "operands swapped": operands_swapped,
    "results swapped": results_swapped,
    "another value": another_value,
    "another parameter": another_parameter,
    "live value overwritten": live_value_overwritten,
    "accumulation dropped": accumulation_dropped,
    "accumulation doubled": accumulation_doubled,
    "residual stale": residual_stale,
    "batch stale": batch_stale,
    "message wrong": message_wrong,
    "of another iteration": of_another_iteration,
    "another range": another_range,
    "row of other values": row_of_other_values,
    "carried value lost": carried_value_lost,
    "part given others": part_given_others,
    "part gives others": part_gives_others,
    "another part": another_part,
    "declared otherwise": declared_otherwise,
}


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
