"""Which ops a pending sum may pass: f(x + x') = f(x) + f(x').

A sum that is pending over ranks or microbatches travels on through linear ops, and is
completed once, where something else needs it. By its declaration an op is linear

    jointly        f(x + x', y + y') = f(x, y) + f(x', y')
    in each        operand, while the others are held
    in the first   operand, or in the second, while the others are held
    chosen         in both operands that a condition, one for all, chooses between
    cast           as a change of type, if that keeps numbers as they are; one number,
                   as a loss, may be rounded in each share
"""

from __future__ import annotations

import torch

from ..graph import Node, Value
from ..ops.op import op_of

ADDED = ("aten.add", "aten.sub")  # a number that is added is no sum


def is_jointly_linear(node: Node) -> bool:
    """Whether pending sums of all operands together give pending sums of its result."""
    tensors = sum(isinstance(a, Value) for a in node.args)
    joint = op_of(node).linear == "jointly"
    return joint and (node.name not in ADDED or tensors == 2)


def passes_pending_sum(node: Node, pending: list[bool]) -> bool:
    """Whether the op of a partial sum is a partial sum of the op's result.

    pending: for each operand, whether it is a pending sum.
    """
    if node.name in ADDED:
        return is_jointly_linear(node) and all(pending)
    out = node.results[0]
    casts = [(v.dtype, out.dtype) for v in node.operands]
    rounds = not out.shape and out.dtype.is_floating_point
    if not rounds and any(
        p and not _keeps_all(*cast) for p, cast in zip(pending, casts, strict=True)
    ):
        return False
    match op_of(node).linear:
        case "cast":
            return pending[0] and node.operands[0].dtype.is_floating_point
        case "jointly":
            return all(pending)
        case "in each":
            return sum(pending) == 1
        case "in the first":
            return pending[0] and not any(pending[1:]) and not node.kwargs
        case "in the second":
            return pending == [False, True]
        case "chosen":
            others = (a for a in node.named("self other") if not isinstance(a, Value))
            each = not any(others) and all(pending[1:])
            return each and not pending[0] and not node.operands[0].shape
    return False


def _keeps_all(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether numbers of one type are numbers of the other: `sum(dtype=...)` need not
    keep them."""
    return torch.promote_types(before, after) is after
