"""A model with loops over experts as it writes them, and with these as one step: both
in one graph, so that a change of size changes both alike.
"""

from __future__ import annotations

from dataclasses import replace

from ...builder import Builder, prune
from ...graph import Graph, Node, Value, map_values
from ...traced import Traced
from ..rows.chosen_rows import keep_all_rows


def put_together(looped: Traced, batched: Traced) -> Traced:
    """One graph of both, with a loss of each. Raises: CaptureError on what is not done
    row by row."""
    one, other = map(_all_rows, (looped, batched))
    made = (v for node in one.nodes for v in node.results)
    builder = Builder.beside((*one.sources, *made))
    renamed: dict[str, Value] = {}

    def new(v: Value) -> Value:
        return renamed.get(v.name, v)

    for node in other.nodes:
        args, kwargs = map_values(new, node.args), map_values(new, node.kwargs)
        for v in node.results:
            renamed[v.name] = builder.value(v.name, v.shape, v.dtype)
        outs = tuple(None if v is None else new(v) for v in node.outs)
        builder.nodes.append(Node(node.op, args, kwargs, outs, node.location))
    nodes, losses = (
        (*one.nodes, *builder.nodes),
        (one.outputs[0], new(other.outputs[0])),
    )
    graph = prune(replace(one, nodes=nodes, outputs=losses)).verify()
    return replace(
        looped, graph=graph, outputs=("",), metrics=0, updated=(), loops=None
    )


def of_each(both: Traced) -> tuple[Traced, ...]:
    """Splits both again, each with the sources that it reads."""
    return tuple(
        replace(both, graph=prune(replace(both.graph, outputs=(loss,))), outputs=())
        for loss in both.graph.outputs
    )


def _all_rows(traced: Traced) -> Graph:
    return keep_all_rows(traced.graph, traced.autocast.keys())
