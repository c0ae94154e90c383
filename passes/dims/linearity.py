"""Which ops a pending sum may pass: f(x + x') = f(x) + f(x').

A sum that is pending over ranks or microbatches travels on through linear ops, and is
completed once, where something else needs it.
"""

from __future__ import annotations

import torch

from passes.dims.rules import MOVES
from passes.graph import Node, Value

# f(x + x', y + y') = f(x, y) + f(x', y')
JOINTLY_LINEAR = frozenset(
    {
        "aten.add",
        "aten.sub",
        "aten.neg",
        "aten.sum",
        "aten.reshape",
        *(f"aten.{move}" for move in MOVES),
        "aten.expand",
        "aten.slice",
        "aten.select",
        "aten.unbind",
        "aten.split",
        "aten.chunk",
        "aten.split_with_sizes",
        "aten.cat",
        "aten.stack",
        "aten.detach",
    }
)
ADDED = ("aten.add", "aten.sub")  # a number that is added is no sum
# Linear in one operand while the others are held; the numerator only, for division.
LINEAR_IN_EACH = frozenset(
    f"aten.{n}" for n in ("mul", "linear", "matmul", "bmm", "einsum")
)


def is_jointly_linear(node: Node) -> bool:
    """Whether shares of each of its operands give shares of its result."""
    name = node.name
    tensors = sum(isinstance(a, Value) for a in node.args)
    return name in JOINTLY_LINEAR and (name not in ADDED or tensors == 2)


def passes_pending_sum(node: Node, pending: list[bool]) -> bool:
    """Whether the op of a partial sum is a partial sum of the op's result.

    pending: for each operand, whether it is a pending sum.
    """
    name = node.name
    if name in ADDED:
        return is_jointly_linear(node) and all(pending)
    casts = [(v.dtype, node.results[0].dtype) for v in node.operands]
    if any(p and not _keeps_all(*cast) for p, cast in zip(pending, casts, strict=True)):
        return False
    if name == "aten.to":
        return pending[0] and node.operands[0].dtype.is_floating_point
    if name in JOINTLY_LINEAR:
        return all(pending)
    if name in LINEAR_IN_EACH:
        return sum(pending) == 1
    if name == "aten.div":
        return pending[0] and not any(pending[1:]) and not node.kwargs
    return False


def _keeps_all(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether numbers of one type are numbers of the other: `sum(dtype=...)` need not
    keep them."""
    return torch.promote_types(before, after) is after
