"""split_backward: the backward of a stage in two halves.

The input half makes what the stage before waits for; the weight half, the gradients of
parameters, can run at any later time (Qi 2023, arXiv:2401.10241, section 2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..graph import Node, Value
from ..ops.memory import find_owners

GRADIENT = "grad."  # what names of gradient buffers begin with


def split_backward(
    nodes: Sequence[Node], cotangents: Collection[str]
) -> tuple[list[Node], list[Node]]:
    """Cut a backward into its input half and its weight half, each in the same order.

    nodes: before `reuse`, so that only nodes without results write over something,
    their first operand. cotangents: names of the values that the input half is for.

    The weight half runs when all of the input half is done: what it reads must not have
    been written over by then, or else is read in the input half already.
    """
    outside = {v.name: v.name for node in nodes for v in node.operands}
    owners = find_owners(nodes, outside)
    needed = set(cotangents)
    # Memory that the input half reads or writes, after the node that is looked at.
    read = {owners[name] for name in cotangents if name in owners}
    written: set[str] = set()
    first, second = [], []
    for node in reversed(nodes):
        roots = {owners.get(v.name, v.name) for v in node.operands}
        target = "" if node.results else owners[node.operands[0].name]
        if (
            target in read
            or not written.isdisjoint(roots)
            or any(v.name in needed for v in node.results)
        ):
            first.append(node)
            needed.update(v.name for v in node.operands)
            # Sums into a gradient may come in any order.
            read.update(r for r in roots if not r.startswith(GRADIENT))
            if target and not target.startswith(GRADIENT):
                written.add(target)
        else:
            second.append(node)
    return first[::-1], second[::-1]


def find_dependent(sources: Iterable[Value], nodes: Iterable[Node]) -> set[str]:
    """Names of the sources and of all values that depend on them."""
    dependent = {v.name for v in sources}
    for node in nodes:
        if any(v.name in dependent for v in node.operands):
            dependent.update(v.name for v in node.results)
    return dependent
