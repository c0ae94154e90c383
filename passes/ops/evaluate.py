"""What a node computes, on plain tensors in one process.

Ops of our own have kernels elsewhere; their formulas say what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..graph import Node, resolve
from ..ops.op import OPS, op_of

Results = tuple[Tensor | None, ...]


def evaluate(
    node: Node, operands: Sequence[Tensor], start: int | None = None
) -> Results:
    """The results of a node on the given operands, one a tensor argument.

    start: for an op that must know it, at which global index its shard begins: of a
    table that is looked up in, or of the rows of causal attention.
    """
    given = iter(operands)
    node = node.substitute(lambda _: next(given))
    if start is not None:
        on_shard = op_of(node).on_shard
        assert on_shard is not None, f"{node.op} does not know where a shard begins"
        found: Any = on_shard(start, *node.args, **node.kwargs)
    else:
        found = function_of(node.op)(*node.args, **node.kwargs)
    if isinstance(found, Tensor):
        return (found,)
    return tuple(x if isinstance(x, Tensor) else None for x in found)


def function_of(op: str) -> Callable[..., Any]:
    """torch's operator, or the formula of an op of our own."""
    own = OPS.get(op)
    found: Callable[..., Any] = own.formula if own and own.formula else resolve(op)
    return found
