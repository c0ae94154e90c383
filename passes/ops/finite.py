"""Which ops give finite numbers and derivatives, and which may not, as log of 0.

A number that counts for nothing must be finite all the same: its cotangent is 0, and 0
times what is not finite is no number.
"""

from __future__ import annotations

import math

from ..graph import Graph, Node
from ..ops.op import op_of

LINEAR = ("jointly", "in each", "cast")


def keeps_finite(node: Node) -> bool:
    """Whether results, and derivatives in all operands, are finite where operands are;
    but for numbers that are too large for their type."""
    op = op_of(node)
    finite = op.finite(node) if callable(op.finite) else op.finite
    return bool(finite or op.view or op.elements or op.linear in LINEAR)


def not_finite(graph: Graph) -> frozenset[str]:
    """Names of the values that a model may make NaN or infinite, and be trained all the
    same: of inputs with gaps, of ops that nothing flows back through, of fills by -inf.
    """
    flowing = {v.name for v in graph.params}
    names = {v.name for v in graph.inputs if v.dtype.is_floating_point}
    batched = {v.name for v in graph.inputs}
    for node in graph.nodes:
        read = {v.name for v in node.operands}
        floating = [v.name for v in node.results if v.dtype.is_floating_point]
        if read & flowing and node.name != "aten.detach":
            flowing.update(floating)
        batched.update(v.name for v in node.results if read & batched)
        made = not (keeps_finite(node) or flowing.intersection(floating))
        handed_on = read & names and op_of(node).finite != "always"
        if (made and read & batched) or handed_on or fills(node):
            names.update(floating)
    return frozenset(names)


def fills(node: Node) -> bool:
    """Whether a number that is not finite is among the arguments."""
    args = (*node.args, *node.kwargs.values())
    return any(isinstance(a, float) and not math.isfinite(a) for a in args)
