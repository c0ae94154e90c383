"""Where ops take or write a part of a dim."""

from __future__ import annotations

from typing import Any

from ..graph import Node, Value

CUTS = ("slice", "slice_scatter", "select", "select_scatter", "narrow")


def cut_of(node: Node) -> tuple[Value, int, int, int] | None:
    """(value, dim, start, end) of an op that takes or writes a part of one dim."""
    kind = node.name.removeprefix("aten.")
    if kind not in CUTS:
        return None
    x, dim = node.operands[0], dim_of(node)
    extent = x.shape[dim]
    if kind.startswith("select"):
        low = _position(node.arg("index"), 0, extent)
        return x, dim, low, low + 1
    low = _position(node.arg("start"), 0, extent)
    if kind == "narrow":
        return x, dim, low, low + node.out.shape[dim]
    return x, dim, low, max(low, _position(node.arg("end"), extent, extent))


def _position(at: Any, default: int, extent: int) -> int:
    if at is None:
        return default
    return min(max(at + extent if at < 0 else at, 0), extent)


def dim_of(node: Node, rank: int | None = None) -> int:
    rank = len(node.operands[0].shape) if rank is None else rank
    return int(node.arg("dim")) % rank
