"""The sharding rule of a node: which letters flow through it (see `notation`)."""

from __future__ import annotations

import torch

from ..graph import Node, resolve
from ..ops.notation import Equation, parse
from ..ops.op import is_view, op_of


def equation(node: Node) -> Equation | None:
    """The rule of this node, or None if its op has none that fits its operands' ranks.

    Reshapes have no equation: their dims are matched by size, in `name_dims`.
    """
    rule = op_of(node).rule
    if is_pointwise(node):
        many, outs = (["..."] * len(x) for x in (node.operands, node.outs))
        rule = f"{', '.join(many)} -> {', '.join(outs)}"
    text = rule(node) if callable(rule) else rule
    return None if text is None else parse(text, node)


def is_fusable(node: Node) -> bool:
    """Whether compilers run the op in one kernel with elementwise ones beside it."""
    return op_of(node).rowwise or (not is_view(node) and is_pointwise(node))


def is_pointwise(node: Node) -> bool:
    """Whether the op works element by element: declared so, or by torch's own tag."""
    rule = op_of(node).rule
    if rule is not None or not node.is_aten:
        return rule == "pointwise"
    return torch.Tag.pointwise in resolve(node.op).tags
