"""views: what a write to a part of a tensor makes of the whole tensor."""

from __future__ import annotations

from typing import Any

from ..builder import Builder
from ..graph import Node, Value

# Ops whose result is a view of their operand, if it lies in the same memory. (`detach`
# hides the write from autograd, which refuses writes to one of several results.)
REORDERED = {"aten.transpose", "aten.t", "aten.numpy_T", "aten.mT", "aten.permute"}
CUTS = {"aten.slice", "aten.narrow", "aten.select"}
# Those that keep elements in their order, if they keep all of them: the others copy.
RESHAPED = {
    *("aten.view", "aten.unsqueeze", "aten.squeeze", "aten.alias", "aten.reshape"),
    *("aten.flatten", "aten.unflatten", "aten.view_as", "aten.reshape_as"),
    *("aten.expand", "aten.expand_as", "aten.contiguous", "aten.to", "aten.type_as"),
    *("aten.float", "aten.dropout", "aten.alpha_dropout", "aten.feature_dropout"),
}


def is_view(node: Node) -> bool:
    """Whether what a node makes, in the memory of its operand, can be put back."""
    name = node.name
    if name in RESHAPED:
        return node.out.numel == node.operands[0].numel
    return name in REORDERED or name in CUTS


def put_back(builder: Builder, view: Node, base: Value, part: Value) -> Value:
    """The tensor `base` after `part` was written to a view of it."""
    name = view.name

    def emit(op: str, *args: Any) -> Value:
        return builder.emit(op, args, base.shape, base.dtype, view.location)

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
