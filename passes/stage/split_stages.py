"""split_stages: cut the graph into pipeline stages of balanced cost.

A stage is cut where one value crosses, with no more than small ones beside it (a
balance loss), at the border of a layer if there are enough of such places. What depends
on constants, the batch or parameters alone is not sent but computed again on each stage
that needs it; a tied weight lives on each stage that uses it. Names inside a stage
count layers from its first, so equal stages have equal text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..cost import NodeCosts
from ..dims.name_dims import Dims
from ..dims.origins import Origin, find_differentiable
from ..graph import LAYER, Graph, Node, Value
from ..mesh import TIME
from ..plan import Plan
from ..shard.insert_collectives import Lowered
from ..shard.sharding import Sharding
from ..stage.chain import Chain


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage computes, in three parts.

    setup: from constants and buffers alone, once. prologue: from the batch alone, once
    a step. forward: for each microbatch, from what it receives to what it sends.
    outputs: what it makes of the model's outputs beside the loss, in their order, and
    their names in the whole graph.
    names: parameter or buffer name in the stage -> the model's own name; layers: of its
    own layers, in order.
    """

    index: int
    setup: tuple[Node, ...]
    prologue: tuple[Node, ...]
    forward: tuple[Node, ...]
    inputs: tuple[Value, ...]
    params: tuple[Value, ...]
    buffers: tuple[Value, ...]
    constants: tuple[Value, ...]
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]
    outputs: tuple[Value, ...]
    output_names: tuple[str, ...]
    loss: Value | None
    names: Mapping[str, str]
    dims: Mapping[str, Dims]
    shardings: Mapping[str, Sharding]
    differentiable: frozenset[str]
    modules: tuple[str, ...]
    layers: Mapping[str, str]

    def policies(self, plan: Plan) -> dict[str, str]:
        """The policy of recomputation of each layer, by the stage's own names."""
        return {own: plan.policy(layer) for own, layer in self.layers.items()}

    @property
    def graph(self) -> Graph:
        """Returns all parts as one."""
        nodes = (*self.setup, *self.prologue, *self.forward)
        ends = self.sends + self.outputs + ((self.loss,) if self.loss else ())
        sources = (self.inputs + self.receives, self.params, self.buffers)
        return Graph(*sources, self.constants, nodes, ends)

    def verify(self) -> Stage:
        """Names are unique, and everything is made, held or received before its use."""
        self.graph.verify()
        return self

    def text(self, places: bool = False) -> str:
        """Prints all that an emitted module depends on, but for what is split how.
        places: where nodes are from, too."""
        sources = {v.name for v in (*self.receives, *self.params, *self.buffers)}
        received = {v.name for v in self.receives}
        texts: dict[tuple[int, int], str] = {}  # layers that are alike share both

        def note(v: Value) -> str:
            sharding, dims = self.shardings[v.name], self.dims[v.name]
            text = texts.get((id(sharding), id(dims)))
            if text is None:
                text = sharding.exact_text(dims)
                texts[id(sharding), id(dims)] = text
            text += "  received" if v.name in received else ""
            trained = v.name in sources and v.name in self.differentiable
            return text + ("  with gradient" if trained else "")

        once = len(self.setup) + len(self.prologue)
        titles = {0: "setup"} if self.setup else {}
        titles |= {len(self.setup): "prologue"} if self.prologue else {}
        titles |= {once: "forward", once + len(self.forward): self.ends}
        return self.graph.text(note, titles, places)

    @property
    def ends(self) -> str:
        """What its graph's outputs are."""
        end = "loss" if self.loss else "send"
        return f"{end}, {len(self.outputs)} of the outputs" if self.outputs else end

    def __str__(self) -> str:
        return f"# stage {self.index}\n{self.text(places=True)}"


@dataclass(frozen=True)
class Staged:
    """A graph that is cut into pipeline stages, first to last."""

    lowered: Lowered
    plan: Plan
    stages: tuple[Stage, ...]

    def verify(self) -> Staged:
        for stage in self.stages:
            stage.verify()
        return self

    def __str__(self) -> str:
        return "\n".join(map(str, self.stages))


def split_stages(lowered: Lowered, costs: NodeCosts | None = None) -> Staged:
    """Cut into `plan.stages` stages, at the plan's cuts or else where it balances.

    costs: of nodes; None: for a plan of one stage, or that has its cuts.

    Raises: StageError if there are not enough places to cut, or a cut is unknown.
    """
    plan = lowered.plan
    chain = Chain(lowered)
    if plan.cuts or plan.stages == 1:
        ends = chain.ends_of(plan.cuts)
    else:
        assert costs is not None, "what is to be cut needs costs"
        ends = chain.balance(plan.stages, costs)
    cuts = tuple(chain.cut_name(end) for end in ends[:-1])
    stages, first = [], 0
    for index, end in enumerate(ends):
        stages.append(cut_stage(chain, index, first, end))
        first = end
    return Staged(lowered, replace(plan, cuts=cuts), tuple(stages))


def cut_stage(chain: Chain, index: int, first: int, end: int) -> Stage:
    """The stage with the chain's nodes from one until before another."""
    return _Cutter(chain).stage(index, first, end).verify()


class _Cutter:
    """Makes one stage: closes over what it needs, and gives stage-relative names."""

    def __init__(self, chain: Chain) -> None:
        self.chain, self.lowered = chain, chain.lowered
        graph = self.lowered.graph
        self.producers = graph.producers()
        self.position = {id(n): i for i, n in enumerate(graph.nodes)}
        self.renamed: dict[str, Value] = {}
        self.counts: dict[str, int] = {}
        self.taken: set[str] = set()
        self.first_layer: dict[str, int] = {}

    def stage(self, index: int, first: int, end: int) -> Stage:
        receives, sends = self.chain.crossing(first), self.chain.crossing(end)
        own = self.chain.nodes[first:end]
        last = end == len(self.chain.nodes)
        outputs = self._outputs(own, last)
        makers = [self.producers[v.name] for v in outputs]
        nodes = self._close([*own, *makers], {v.name for v in receives})
        self._count_layers(own)
        sources = {v.name for n in nodes for v in n.operands}
        graph, loss = self.lowered.graph, self.lowered.graph.outputs[0]
        params, buffers, constants, inputs = (
            tuple(v for v in group if v.name in sources)
            for group in (graph.params, graph.buffers, graph.constants, graph.inputs)
        )
        names = {}
        for v in (*params, *buffers):
            names[self._rename_source(v).name] = v.name
        for v in (*inputs, *constants):
            self.renamed[v.name] = v
        self.taken = {v.name for v in self.renamed.values()}
        for v in receives:
            self._rename(v, "x")
        parts = self._parts(nodes)
        dims, shardings = self.lowered.dims, self.lowered.shardings
        old = {v.name: name for name, v in self.renamed.items()}
        traced = self.lowered.traced
        flowing = find_differentiable(graph, traced.trainable)
        modules = tuple(dict.fromkeys(n.location.layer for n in own))

        def new(values: Sequence[Value]) -> tuple[Value, ...]:
            return tuple(self.renamed[v.name] for v in values)

        return Stage(
            index=index,
            setup=tuple(parts["setup"]),
            prologue=tuple(parts["prologue"]),
            forward=tuple(parts["forward"]),
            inputs=new(inputs),
            params=new(params),
            buffers=new(buffers),
            constants=new(constants),
            receives=new(receives),
            sends=new(sends),
            outputs=new(outputs),
            output_names=tuple(v.name for v in outputs),
            loss=self.renamed[loss.name] if last else None,
            names=names,
            dims={new: dims[name] for new, name in old.items()},
            shardings={new: shardings[name] for new, name in old.items()},
            differentiable=frozenset(n for n, name in old.items() if name in flowing),
            modules=modules,
            layers={self._relative(layer): layer for layer in modules if layer},
        )

    def _outputs(self, own: Sequence[Node], last: bool) -> tuple[Value, ...]:
        """The outputs that a stage makes; the last one's include those of no stage."""
        there = {v.name for n in own for v in n.results}
        chain = {v.name for n in self.chain.nodes for v in n.results}
        outputs = dict.fromkeys(self.lowered.graph.outputs[1:])
        return tuple(
            v for v in outputs if v.name in there or (last and v.name not in chain)
        )

    def _close(self, own: list[Node], received: set[str]) -> list[Node]:
        """The stage's nodes and all that they need but nobody sends, in graph order."""
        chosen = {id(n): n for n in own}
        waiting = list(own)
        while waiting:
            for v in waiting.pop().operands:
                node = self.producers.get(v.name)
                if node is None or id(node) in chosen or v.name in received:
                    continue
                chosen[id(node)] = node
                waiting.append(node)
        return sorted(chosen.values(), key=lambda n: self.position[id(n)])

    def _parts(self, nodes: Sequence[Node]) -> dict[str, list[Node]]:
        """What runs when. Of what is not run for each microbatch, equal nodes are one,
        whatever their dims are called: layers that make the same of the same positions
        share it."""
        parts: dict[str, list[Node]] = {"setup": [], "prologue": [], "forward": []}
        known: dict[Any, Node] = {}
        same: dict[str, Value] = {}
        dims, shardings = self.lowered.dims, self.lowered.shardings
        for node in nodes:
            part = self._part(node)
            own = self._rename_node(node)
            if same:
                own = own.substitute(lambda v: same.get(v.name, v))
            if part != "forward":
                lies = [
                    ([[d.size for d in dim] for dim in dims[v.name]], shardings[v.name])
                    for v in node.results
                ]
                there = [v is not None for v in node.outs]
                key = repr((own.op, own.args, dict(own.kwargs), there, lies))
                first = known.setdefault(key, own)
                if first is not own:
                    names = (v.name for v in own.results)
                    same.update(zip(names, first.results, strict=True))
                    continue
            parts[part].append(own)
        return parts

    def _part(self, node: Node) -> str:
        """The part that runs a node: with constants, with the batch, or in the loop."""
        origins = [self.lowered.origins[v.name] for v in node.results]
        split_in_time = any(
            self.lowered.shardings[v.name].place(TIME) for v in node.results
        )
        if split_in_time or any(o & Origin.PARAM for o in origins):
            return "forward"
        return "prologue" if any(o & Origin.INPUT for o in origins) else "setup"

    # --- names that count from the stage's first layer -----------------------------

    def _count_layers(self, own: list[Node]) -> None:
        for node in own:
            for match in LAYER.finditer(node.location.module):
                prefix = node.location.module[: match.start()]
                number = int(match[1])
                known = self.first_layer.get(prefix, number)
                self.first_layer[prefix] = min(known, number)
                break

    def _relative(self, path: str) -> str:
        """`transformer.h.7.attn` -> `transformer.h.+1.attn` in a stage from layer 6."""
        match = LAYER.search(path)
        if match is None or path[: match.start()] not in self.first_layer:
            return path
        offset = int(match[1]) - self.first_layer[path[: match.start()]]
        # What an earlier layer made of constants is made here again.
        layer = f"{offset:+d}" if offset >= 0 else "*"
        return f"{path[: match.start()]}{layer}{path[match.end() :]}"

    def _rename_source(self, v: Value) -> Value:
        """What belongs to a layer of another stage keeps its own name."""
        name = self._relative(v.name)
        self.renamed[v.name] = v if "*" in name else replace(v, name=name)
        return self.renamed[v.name]

    def _rename(self, v: Value, stem: str | None = None) -> Value:
        stem = stem or re.sub(r"(_\d+)+$", "", v.name)
        count = self.counts.get(stem, 0)
        while (name := f"{stem}_{count}" if count else stem) in self.taken:
            count += 1
        self.counts[stem] = count + 1
        self.renamed[v.name] = Value(name, v.shape, v.dtype)
        return self.renamed[v.name]

    def _rename_node(self, node: Node) -> Node:
        outs = tuple(None if v is None else self._rename(v) for v in node.outs)
        node = node.substitute(lambda v: self.renamed[v.name])
        node = node.in_module(self._relative(node.location.module))
        return replace(node, outs=outs)
