"""views: what a write to a part of a tensor makes of the whole tensor."""

from __future__ import annotations

from ...builder import Builder
from ...graph import Node, Value
from ...ops.op import op_of


def is_view(node: Node) -> bool:
    """Whether what a node makes, in the memory of its operand, can be put back. Those
    that keep elements in their order must keep all of them: the others copy. (`detach`
    hides the write from autograd, which refuses writes to one of several results.)"""
    op = op_of(node)
    if op.put_back is None:
        return False
    return op.part is not None or node.out.numel == node.operands[0].numel


def put_back(builder: Builder, view: Node, base: Value, part: Value) -> Value:
    """The tensor `base` after `part` was written to a view of it."""
    write = op_of(view).put_back
    assert write is not None, f"{view} is no view"
    op, args = write(view, base, part)
    return builder.emit(op, args, base.shape, base.dtype, view.location)
