"""views: what a write to a part of a tensor makes of the whole tensor."""

from __future__ import annotations

from typing import Any

from passes.graph import Builder, Node, Value

# Ops whose result always is a view of their operand. (`reshape` and `contiguous` may
# copy, `detach` hides the write from autograd, which refuses writes to one of several
# results.)
REORDERED = {"aten.transpose", "aten.t", "aten.numpy_T", "aten.mT", "aten.permute"}
RESHAPED = {"aten.view", "aten.unsqueeze", "aten.squeeze", "aten.alias"}
VIEWS = {"aten.slice", "aten.narrow", "aten.select", *REORDERED, *RESHAPED}


def is_view(node: Node) -> bool:
    return node.op.rpartition(".")[0] in VIEWS


def put_back(builder: Builder, view: Node, base: Value, part: Value) -> Value:
    """The tensor `base` after `part` was written to a view of it."""
    name = view.op.rpartition(".")[0]

    def emit(op: str, *args: Any) -> Value:
        return builder.emit(op, args, base.shape, base.dtype, view.where)

    if name == "aten.slice":
        return emit("aten.slice_scatter.default", base, part, *view.args[1:])
    if name == "aten.narrow":
        _, dim, start, length = view.args
        end = start % base.shape[dim] + length
        return emit("aten.slice_scatter.default", base, part, dim, start, end)
    if name == "aten.select":
        return emit("aten.select_scatter.default", base, part, *view.args[1:])
    if name == "aten.transpose":
        return emit("aten.transpose.int", part, *view.args[1:])
    if name == "aten.permute":
        order = [d % len(base.shape) for d in view.args[1]]
        back = tuple(order.index(d) for d in range(len(order)))
        return emit("aten.permute.default", part, back)
    if name in REORDERED:
        return emit(view.op, part)
    return emit("aten.reshape.default", part, base.shape)
