"""Which nodes communicate over mesh axes, and what they move."""

from __future__ import annotations

from ..graph import Node, Value
from ..mesh import as_axes
from ..ops.experts import ROUTED
from ..ops.op import op_of


def collective(node: Node) -> tuple[str, tuple[str, ...]] | None:
    """("all_gather", its axes); None for what sends nothing. What is waited for later
    counts where it starts."""
    kind = op_of(node).kind
    return (kind, axes_of(node)) if kind else None


def axes_of(node: Node) -> tuple[str, ...]:
    """The mesh axes over which a node gathers, scatters, adds up or splits."""
    return as_axes(node.arg("axes"))


def contributed_bytes(node: Node) -> int:
    """Bytes that a rank sends into a collective."""
    moved = node.operands[:1] if node.op in ROUTED else node.operands
    return sum(v.bytes for v in moved)


def bytes_of(node: Node, result: Value) -> int:
    """Bytes of a node's result; for a scatter under way, of what it sends and the
    addends that arrive."""
    return result.bytes * (2 if node.op == "comm.start_scatter" else 1)
