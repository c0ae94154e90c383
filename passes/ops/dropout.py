"""Dropout whose mask does not depend on the plan."""

from __future__ import annotations

from dataclasses import replace

from ..graph import Node
from ..ops import extents, parts
from ..ops.op import Op, Place


def on_rank(at: Place, node: Node, local: Node) -> Node:
    """The mask is a function of the global position of each element."""
    x = node.operands[0]
    position = tuple(at.position(x, dim) for dim in range(len(x.shape)))
    return replace(local, op="comm.dropout", args=(*local.args, position))


OPS = (
    Op(
        "aten.dropout",
        "input p train",
        elements="like",
        extents=extents.aligned,
        counts=True,
        put_back=parts.reshaped,
    ),
    Op("autopar.dropout", "x p number", "... -> ...", keeps=("mask",), on_rank=on_rank),
    Op("comm.dropout_mask", "p number position", rowwise=True),
)
