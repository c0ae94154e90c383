"""Bytes that nodes move where elementwise ops in a row run as one kernel.

Compilers (and hand-written kernels: bias, dropout and residual; scale, mask and
softmax) keep what one such op hands to the next in registers. It is written only if
something else reads it too, or if it is kept for later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..cost import traffic
from ..graph import Node, Value
from ..ops.op import is_view
from ..ops.rules import is_fusable


def fused_traffic(
    nodes: Sequence[Node], live_out: Collection[str]
) -> list[tuple[int, bool]]:
    """Returns the bytes that each node reads and writes, and whether it is a kernel of
    its own or the first op of one.

    live_out: names of the values that live on after the last node.
    """
    roots, alone = _roots(nodes), [not is_fusable(node) for node in nodes]
    producers = {v.name: i for i, n in enumerate(nodes) for v in n.results}
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        if not is_view(node):
            for name in {roots[v.name] for v in node.operands}:
                readers.setdefault(name, []).append(i)
    stays = {roots.get(name, name) for name in live_out}

    def handed(name: str, reader: int) -> bool:
        """Whether a value goes from its op to this reader in registers."""
        made = producers.get(name)
        return (
            made is not None
            and not (alone[made] or alone[reader])
            and readers[name][0] == reader
        )

    traffic_of = []
    for i, node in enumerate(nodes):
        if not traffic(node):
            traffic_of.append((0, False))
            continue
        read = {v.name: v for v in node.operands}
        comes = {name: handed(roots[name], i) for name in read}
        moved = sum([v.bytes for name, v in read.items() if not comes[name]])
        for v in node.results:
            later = readers.get(v.name, [])
            inside = len(later) == 1 and handed(v.name, later[0])
            if not inside or v.name in stays:
                moved += v.bytes
        traffic_of.append((moved, not any(comes.values())))
    return traffic_of


def _roots(nodes: Sequence[Node]) -> dict[str, str]:
    """Value -> the value that it is a view of, or itself."""
    roots: dict[str, str] = {}

    def root(v: Value) -> str:
        return roots.setdefault(v.name, v.name)

    for node in nodes:
        operands = [root(v) for v in node.operands]
        for v in node.results:
            roots[v.name] = operands[0] if is_view(node) else v.name
    return roots
