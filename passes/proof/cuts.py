"""Where ops take or write a part of a dim; their arguments, by position or name."""

from __future__ import annotations

from typing import Any

from passes.graph import Node, Value


def cut_of(node: Node) -> tuple[Value, int, int, int] | None:
    """(value, dim, start, end) of an op that takes or writes a part of one dim."""
    name = node.op.rpartition(".")[0]
    if name in ("aten.slice", "aten.slice_scatter"):
        skip = 1 if name == "aten.slice" else 2
        dim = given_arg(node, skip, "dim", 0)
        start = given_arg(node, skip + 1, "start")
        end = given_arg(node, skip + 2, "end")
    elif name in ("aten.select", "aten.select_scatter"):
        skip = 1 if name == "aten.select" else 2
        dim, start = given_arg(node, skip, "dim"), given_arg(node, skip + 1, "index")
        end = None
    elif name == "aten.narrow":
        dim, start = given_arg(node, 1, "dim"), given_arg(node, 2, "start")
        end = None
    else:
        return None
    x = node.operands[0]
    dim %= len(x.shape)
    extent = x.shape[dim]
    low = _position(start, 0, extent)
    if "select" in name:
        return x, dim, low, low + 1
    if name == "aten.narrow":
        return x, dim, low, low + node.out.shape[dim]
    return x, dim, low, max(low, _position(end, extent, extent))


def _position(at: Any, default: int, extent: int) -> int:
    if at is None:
        return default
    return min(max(at + extent if at < 0 else at, 0), extent)


def step_of(node: Node) -> int:
    skip = {"aten.slice": 4, "aten.slice_scatter": 5}.get(node.op.rpartition(".")[0])
    return given_arg(node, skip, "step", 1) if skip else 1


def given_arg(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument, by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def dim_of(node: Node, position: int, rank: int | None = None) -> int:
    rank = len(node.operands[0].shape) if rank is None else rank
    return int(given_arg(node, position, "dim", 0)) % rank
