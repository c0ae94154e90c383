"""fuse_collectives: a dim that is gathered or scattered over several axes goes as one.

Moves are found axis by axis. Where a value split over axes one inside of the other is
gathered over both, or a sum pending over both is scattered, one collective over all
their ranks moves the same bytes in half as many messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..graph import Graph, Node
from ..shard.collectives import axes_of
from ..shard.sharding import Sharding

GATHER, SCATTER = "comm.all_gather", "comm.reduce_scatter"


def fuse_collectives(
    graph: Graph, shardings: Mapping[str, Sharding], order: Sequence[str]
) -> Graph:
    """The graph with collectives joined. order: of axes, as ranks lie on the mesh."""
    consumers = graph.consumers()
    outputs = {v.name for v in graph.outputs}
    made: dict[str, Node] = {}
    for node in graph.nodes:
        first = made.get(node.operands[0].name) if node.operands else None
        if first is not None and _follows(first, node, shardings, order):
            x, between = first.operands[0], first.out.name
            alone = len(consumers[between]) == 1 and between not in outputs
            if alone:
                del made[between]
                node = node.with_args(x=x, axes=_joined(first, node))
        made[node.results[0].name] = node
    return replace(graph, nodes=tuple(made.values())).verify()


def _follows(
    first: Node, node: Node, shardings: Mapping[str, Sharding], order: Sequence[str]
) -> bool:
    """Whether a collective goes on with another one: of the next axis inwards, if they
    scatter, and outwards, if they gather values that ranks use differently."""
    if first.op != node.op or node.op not in (GATHER, SCATTER):
        return False
    if first.arg("dim") != node.arg("dim"):
        return False
    axes = _joined(first, node)
    split = first.operands[0] if node.op == GATHER else node.out
    slots = shardings[split.name].slots[node.arg("dim")]
    if len(slots) != 1 or slots[0][-len(axes) :] != axes:
        return False
    if list(axes) != [a for a in order if a in axes]:
        return False
    return node.op == SCATTER or set(axes) <= shardings[node.out.name].varying


def _joined(first: Node, node: Node) -> tuple[str, ...]:
    """The axes of both, outermost first."""
    inner, outer = axes_of(first), axes_of(node)
    return (*outer, *inner) if node.op == GATHER else (*inner, *outer)
