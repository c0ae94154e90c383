"""Mutants of emitted text: one statement of a module, changed as a fault would.

Each function takes a statement and yields what it could be instead, as lines of text;
`None` stands for no line at all. `KINDS` gives them names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

TABLE = re.compile(r"\b([a-z])\['([^']*)'\]")
DIMS = re.compile(r"#.*?(\[[^\]]*\])")
MOST_INT = 1 << 30  # above it, an integer is "to the end"


@dataclass(frozen=True)
class Place:
    """A statement of a module, and what is known there.

    line: as it is written, without its comment. axes: the mesh's, with sizes.
    like: name -> others of the same dims that are there. parameters: name -> shape.
    later: names that are read after it.
    """

    statement: ast.stmt
    line: str
    function: str
    axes: dict[str, int]
    like: dict[str, list[str]]
    parameters: dict[str, str]
    later: set[str]


Mutate = Callable[[Place], Iterator[str | None]]


def places(text: str, axes: dict[str, int]) -> Iterator[Place]:
    """Every statement of the functions that are called in each step, one line each."""
    lines, tree = text.split("\n"), ast.parse(text)
    parameters = _parameters(tree)
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        dims: dict[str, str] = {}
        last = _last_reads(function)
        for i, statement in enumerate(function.body):
            if statement.lineno != statement.end_lineno:
                continue
            later = {name for name, at in last.items() if at > i}
            like: dict[str, list[str]] = {}
            for name, own in dims.items():
                like[name] = [n for n, d in dims.items() if d == own and n != name]
            line = bare(lines[statement.lineno - 1])
            known = (function.name, axes, like, parameters, later)
            yield Place(statement, line, *known)
            found = DIMS.search(lines[statement.lineno - 1])
            if isinstance(statement, ast.Assign) and found:
                target = statement.targets[0]
                if isinstance(target, ast.Name):
                    dims[target.id] = found[1]
            if isinstance(statement, ast.Delete):
                for gone in statement.targets:
                    dims.pop(ast.unparse(gone), None)


def _last_reads(function: ast.FunctionDef) -> dict[str, int]:
    """Name -> the last statement that reads it."""
    return {
        name.id: i
        for i, statement in enumerate(function.body)
        if not isinstance(statement, ast.Delete)
        for name in ast.walk(statement)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)
    }


def _parameters(tree: ast.Module) -> dict[str, str]:
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "PARAMETERS"
        ):
            assert isinstance(node.value, ast.Dict)
            return {
                ast.literal_eval(key): ast.unparse(value)
                for key, value in zip(node.value.keys, node.value.values, strict=True)
                if key is not None
            }
    return {}


def replaced(place: Place, old: ast.AST, new: str) -> str:
    """The line with one of the statement's expressions written otherwise."""
    assert isinstance(old, ast.expr), "an expression"
    start, end = (n - place.statement.col_offset for n in _extent(old))
    return place.line[:start] + written(new) + place.line[end:]


def _extent(node: ast.expr) -> tuple[int, int]:
    assert node.end_col_offset is not None, "it was read from a text"
    return node.col_offset, node.end_col_offset


def written(code: str) -> str:
    """As emitted modules are: tables have their keys in double quotes."""
    return TABLE.sub(r'\1["\2"]', code)


def calls(place: Place, *names: str) -> Iterator[ast.Call]:
    """The calls in a statement of functions or methods so named (any, if none)."""
    for node in ast.walk(place.statement):
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
        for node in ast.walk(call):
            if isinstance(node, ast.Constant) and node.value in place.axes:
                for axis in place.axes:
                    if axis not in (node.value, "pp"):
                        yield replaced(place, node, repr(axis))


def collective_on_another_dim(place: Place) -> Iterator[str | None]:
    for call in calls(place, *COLLECTIVES, "c.shard"):
        for argument in call.args[2:]:
            for node in ast.walk(argument):
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
        for node in ast.walk(place.statement):
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
            for node in ast.walk(argument):
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
    for node in ast.walk(place.statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            for other in place.like.get(node.id, ())[-2:]:
                yield replaced(place, node, other)


def another_parameter(place: Place) -> Iterator[str | None]:
    """Of the same shape; or of what is gathered, constant or of the batch, any."""
    for node in ast.walk(place.statement):
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id not in ("p", "g") or not isinstance(node.slice, ast.Constant):
            continue
        name = node.slice.value
        for other, kind in place.parameters.items():
            if other != name and kind == place.parameters.get(name):
                yield replaced(place, node, f'{node.value.id}["{other}"]')


def live_value_overwritten(place: Place) -> Iterator[str | None]:
    """Its memory is used again while it is still needed."""
    if not isinstance(place.statement, ast.Assign | ast.Expr):
        return
    text = ast.unparse(place.statement)
    for node in ast.walk(place.statement):
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


def _returned(place: Place) -> list[ast.expr]:
    """The elements of the tuple that a function returns."""
    statement = place.statement
    if not isinstance(statement, ast.Return):
        return []
    return statement.value.elts if isinstance(statement.value, ast.Tuple) else []


def residual_stale(place: Place) -> Iterator[str | None]:
    """What an earlier microbatch, or step, saved."""
    statement = place.statement
    if not isinstance(statement, ast.Return) or not isinstance(
        statement.value, ast.Tuple
    ):
        return
    for part in statement.value.elts:
        for node in part.elts if isinstance(part, ast.List) else ():
            name = ast.unparse(node)
            yield replaced(place, node, f'k.setdefault("old {name}", {name})')


def batch_stale(place: Place) -> Iterator[str | None]:
    """What prologue made of an earlier batch."""
    if not isinstance(place.statement, ast.Return) or place.function != "prologue":
        return
    assert isinstance(place.statement.value, ast.Dict)
    for node in place.statement.value.values:
        name = ast.unparse(node)
        yield replaced(place, node, f'c.__dict__.setdefault("old {name}", {name})')


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
}


def bare(line: str) -> str:
    """Without indentation and comment."""
    return line.partition("  # ")[0].strip()


def with_line(text: str, old: str, new: str | None) -> str:
    """The text with a line written otherwise, wherever it is; its comment stays."""
    lines = []
    for line in text.split("\n"):
        if bare(line) != old:
            lines.append(line)
        elif new is not None:
            lines.append(line.replace(old, written(new), 1))
    return "\n".join(lines)
