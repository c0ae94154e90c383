"""Mutants of emitted text: what ranks say to each other, and which part each takes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from statements import (
    COLLECTIVES,
    Mutate,
    Place,
    arguments,
    called,
    calls,
    replaced,
    walk,
)


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


OF_COLLECTIVES: dict[str, Mutate] = {
    "collective dropped": collective_dropped,
    "collective doubled": collective_doubled,
    "collective on another axis": collective_on_another_axis,
    "collective on another dim": collective_on_another_dim,
    "max for sum, sum for max": max_for_sum,
    "part of another rank": part_of_another_rank,
    "share off by one": share_off_by_one,
    "microbatch counted twice": microbatch_counted_twice,
}
