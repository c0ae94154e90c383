"""split_updates: what buffers have after a step, from sums over the whole batch.

    buffer %bias  f32[8]
    input  %'bias from 0'  i64[8]             of the batch: parts that are summed
    f32[8]   %mul = mul.Tensor(...)
    return %add

Ranks and microbatches compute the inputs, of which no dim is one of the batch; each
rank then computes the rest once, after the step, on whole tensors.
"""

from __future__ import annotations

from dataclasses import replace

from ..builder import Builder, needed_nodes
from ..dims.name_dims import Named
from ..graph import Graph, Location, Node, Value
from ..ops.random import CHANCE, awaits_number
from ..traced import Traced


def with_results(traced: Traced) -> Traced:
    """The same, where no buffer becomes the batch or a parameter itself: outputs are
    results."""
    count = len(traced.updated)
    if not count:
        return traced
    graph = traced.graph
    fixed, last = graph.outputs[:-count], graph.outputs[-count:]
    own = {v.name for v in (*graph.inputs, *graph.params)}
    made = (v for node in graph.nodes for v in node.results)
    builder = Builder.beside([*graph.sources, *made])
    where = Location("", "")
    new = tuple(
        builder.emit("aten.clone.default", (v,), v.shape, v.dtype, where)
        if v.name in own
        else v
        for v in last
    )
    nodes = (*graph.nodes, *builder.nodes)
    return replace(traced, graph=replace(graph, nodes=nodes, outputs=(*fixed, *new)))


def split_updates(named: Named) -> Named:
    """The graph with sums of the batch as outputs, in place of what buffers have after
    a step; which follows from these by `Traced.updates`."""
    traced = named.traced
    if not traced.updated:
        return named
    graph, count = named.graph, len(traced.updated)
    outputs, names = list(graph.outputs[:-count]), list(traced.outputs[:-count])
    updates: dict[str, Graph] = {}
    after = dict(zip(traced.updated, graph.outputs[-count:], strict=True))
    splitter = _Splitter(named)
    for buffer, v in after.items():
        updates[buffer], sums = splitter.split(buffer, v)
        outputs += sums
        names += (x.name for x in updates[buffer].inputs)
    needed = {v.name for v in outputs}
    kept = {*map(id, needed_nodes(graph.nodes, needed, awaits_number))}
    own = [
        pair
        for pair in zip(graph.nodes, named.factors, strict=True)
        if id(pair[0]) in kept
    ]
    nodes, factors = zip(*own, strict=True)
    graph = replace(graph, nodes=nodes, outputs=tuple(outputs))
    traced = replace(
        traced, graph=graph, outputs=tuple(names), updated=(), updates=updates
    )
    return replace(named, traced=traced, factors=factors).verify()


class _Splitter:
    """Splits buffers' new values into sums over ranks, and the rest."""

    def __init__(self, named: Named) -> None:
        self.named, self.producers = named, named.graph.producers()
        fields = (named.dims[v.name] for v in named.graph.inputs)
        self.batch = {d.key for dims in fields for own in dims for d in own}
        fixed = (*named.graph.buffers, *named.graph.constants)
        self.fixed = {v.name: v for v in fixed}

    def split(self, buffer: str, new: Value) -> tuple[Graph, list[Value]]:
        """What computes the new value, and the values of the batch that it reads."""
        nodes: dict[int, Node] = {}
        sums: dict[str, Value] = {}
        read: dict[str, Value] = {}

        def visit(v: Value) -> None:
            if v.name in self.fixed:
                read[v.name] = v
            elif (node := self.producers.get(v.name)) is None or not self._late(node):
                sums[v.name] = v
            elif id(node) not in nodes:
                for x in node.operands:
                    visit(x)
                nodes[id(node)] = node

        visit(new)
        inputs = {
            name: replace(v, name=f"{buffer} from {i}")
            for i, (name, v) in enumerate(sums.items())
        }

        def now(v: Value) -> Value:
            return inputs.get(v.name, v)

        own = {name: name in read for name in self.fixed}
        graph = Graph(
            tuple(inputs.values()),
            (),
            tuple(v for v in self.named.graph.buffers if own[v.name]),
            tuple(v for v in self.named.graph.constants if own[v.name]),
            tuple(node.substitute(now) for node in nodes.values()),
            (now(new),),
        )
        return graph.verify(), list(sums.values())

    def _late(self, node: Node) -> bool:
        """Whether a node reads only sums over the batch, and no part of it."""
        if node.op in CHANCE:
            return False
        for v in node.operands:
            if v.name not in self.producers and v.name not in self.fixed:
                return False  # of the batch, and of parameters, ranks have parts
            if any(d.key in self.batch for own in self.named.dims[v.name] for d in own):
                return False
        return True
