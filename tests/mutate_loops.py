"""Mutants of emitted text: loops and what they keep, a module's own functions, and what
it declares.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import combinations

from statements import NUMBER, Mutate, Place, arguments, calls, replaced, returned, walk

INDEX = re.compile(r"(?<![\w.])i(?!\w)")


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
        nodes = returned(statement)
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


OF_LOOPS: dict[str, Mutate] = {
    "of another iteration": of_another_iteration,
    "another range": another_range,
    "row of other values": row_of_other_values,
    "carried value lost": carried_value_lost,
    "part given others": part_given_others,
    "part gives others": part_gives_others,
    "another part": another_part,
    "declared otherwise": declared_otherwise,
}
