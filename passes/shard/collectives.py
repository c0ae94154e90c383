"""Which nodes communicate over mesh axes, and what they move."""

from __future__ import annotations

from math import prod

from ..graph import Node, Value
from ..mesh import as_axes
from ..ops.experts import COMBINE, DISPATCH, ROUTE
from ..ops.op import op_of

ROUTED = (ROUTE, DISPATCH, COMBINE)
# What only speaks of others that are under way, or may be.
SPEAKS = ("comm.wait", "comm.ready", "comm.pause")


def collective(node: Node) -> tuple[str, tuple[str, ...]] | None:
    """("all_gather", its axes); None for what sends nothing. What is waited for later
    counts where it starts."""
    kind = op_of(node).kind
    return (kind, as_axes(node.args[1])) if kind else None


def contributed_bytes(node: Node) -> int:
    """Bytes of what a rank brings to a collective."""
    moved = node.operands[:1] if node.op in ROUTED else node.operands
    return sum(v.bytes for v in moved)


def workspace(node: Node) -> int:
    """Bytes that a collective has alive beside its operands and results: what it packs
    for others, unless the tensor lies as they want it, and what comes from them.

    As over gloo, where the addends of a reduce-scatter arrive one by one.
    """
    x = node.operands[0] if node.operands else None
    if x is None or collective(node) is None:
        return 0
    if node.op == "comm.reduce_scatter":
        return x.bytes + _packed(x, node.args[2])
    if node.op == "comm.all_gather":
        return _packed(node.out, node.args[2])
    if node.op in ROUTED:
        return x.bytes  # rows in the order in which they leave, or arrive
    if node.op == "comm.all_to_all":
        _, _, split_dim, concat_dim = node.args[:4]
        return _packed(x, split_dim) + _packed(node.out, concat_dim)
    return 0


def _packed(x: Value, dim: int) -> int:
    """Bytes of a copy of x in which the parts along dim follow each other."""
    return x.bytes if prod(x.shape[:dim]) > 1 else 0


def bytes_of(node: Node, result: Value) -> int:
    """Bytes of a node's result; of a scatter under way what is sent, and the addends
    that come."""
    return result.bytes * (2 if node.op == "comm.start_scatter" else 1)


def arrives_in_place(start: Node) -> bool:
    """Whether what a message brings is a view of it: a whole that is gathered alone."""
    if start.op != "comm.start_gather":
        return False
    (x, *more), dim, sizes = start.args[0], start.args[2][0], start.args[3][0]
    return not more and prod(x.shape[:dim]) == 1 and len(set(sizes or ())) < 2
