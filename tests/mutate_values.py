"""Mutants of emitted text: numbers, values, gradients, and what is handed on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from statements import (
    Mutate,
    Place,
    arguments,
    called,
    calls,
    is_collective,
    replaced,
    returned,
    walk,
)

MOST_INT = 1 << 30  # above it, an integer is "to the end"


# --- numbers ------------------------------------------------------------------------


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


def let_go_of_too_early(place: Place) -> Iterator[str | None]:
    """What is read afterwards is gone."""
    if not isinstance(place.statement, ast.Assign):
        return
    for name in sorted(place.later & place.there):
        if re.search(rf"\b{name}\b", place.line.partition(" = ")[2]):
            yield f"{place.line}; del {name}"


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
        lists = (p for p in returned(statement) if isinstance(p, ast.List))
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


OF_VALUES: dict[str, Mutate] = {
    "scale lost": scale_lost,
    "constant changed": constant_changed,
    "operands swapped": operands_swapped,
    "results swapped": results_swapped,
    "another value": another_value,
    "another parameter": another_parameter,
    "live value overwritten": live_value_overwritten,
    "let go of too early": let_go_of_too_early,
    "accumulation dropped": accumulation_dropped,
    "accumulation doubled": accumulation_doubled,
    "residual stale": residual_stale,
    "batch stale": batch_stale,
    "message wrong": message_wrong,
}
