"""Layers that do the same are lowered once: passes run on a graph with few of them, and
the lowered graph of the whole is made from that.

Four times of what repeats are kept: the first, whose operands may come in another way
than later ones' do, the last, of whose results that holds, and two of those between,
which must be lowered to the same (`repeat_layers`). Otherwise, and where a plan names
single layers, the passes run on all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace

from ..builder import with_values
from ..capture.exported.buffer_updates import after_step
from ..graph import LAYER, Graph, Node, Value
from ..layers import FIRST, Layered, NotAlike, Repeats, longest, number_in, renumbered
from ..part import Part
from ..plan import Plan
from ..repeat_layers import Repeater
from ..shard.insert_collectives import Lowered
from ..shard.sharding import Sharding
from ..traced import Traced

KEPT = 4  # times of what repeats
ONE_LAYER = re.compile(r"[\d?\[]")  # in a pattern: it may tell layers apart


@dataclass(frozen=True)
class FewLayers:
    """traced: with few layers. repeats: what the whole has more of, in these terms."""

    traced: Traced
    repeats: Repeats

    def whole(self, lowered: Lowered, traced: Traced) -> Lowered:
        """The lowered graph of the whole. Raises: NotAlike."""
        few = lowered.traced
        notes = _Notes(lowered)
        layered = Layered(lowered.graph, self.repeats.path, few.literals, notes)
        repeater = Repeater(layered, self.repeats)
        wholes = {name: part.source for name, part in few.parts.items()}
        sums = [v.name for g in few.updates.values() for v in g.inputs]
        order = [v.name for v in traced.graph.sources]
        graph = repeater.whole(order, wholes, sums)
        origins = repeater.origins

        def among(names: Collection[str]) -> frozenset[str]:
            return frozenset(v for v, (of, _) in origins.items() if of in names)

        def part(of: str, copies: int) -> Part:
            layer = number_in(self.repeats.path, of) or 0
            source = repeater.renamed(wholes[of], FIRST + layer, copies)
            return replace(few.parts[of], source=source)

        def sharding(of: str, copies: int) -> Sharding:
            lies = lowered.shardings[of]
            if lies.route is None:
                return lies
            expert = repeater.then(lies.route.expert, copies)
            return lies.with_route(replace(lies.route, expert=expert.name))

        parts = {v: part(*of) for v, of in origins.items() if of[0] in wholes}
        updates = {
            name: _renamed(update, rename)
            for buffer, update in few.updates.items()
            for name, rename in repeater.of_layers(buffer).items()
        }
        fixed = few.outputs[: len(few.outputs) - len(sums)]
        whole = replace(
            traced,
            graph=graph,
            literals=few.literals,
            trainable=among(few.trainable),
            parts=parts,
            outputs=(*fixed, *repeater.outputs),
            updated=(),
            updates=updates,
        )
        return Lowered(
            whole,
            lowered.plan,
            graph,
            {v: lowered.dims[of] for v, (of, _) in origins.items()},
            {v: sharding(*of) for v, of in origins.items()},
            {v: lowered.origins[of] for v, (of, _) in origins.items()},
            among(lowered.ahead),
        ).verify()


def _renamed(graph: Graph, rename: Callable[[str], str]) -> Graph:
    """The same graph with other names of its sources."""
    new = {v.name: replace(v, name=rename(v.name)) for v in graph.sources}
    return with_values(graph, lambda v: new.get(v.name, v))


class _Notes:
    """What there is to know of a value beside the graph, but for names."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered

    def __call__(self, v: Value) -> Hashable:
        lies = self.lowered.shardings[v.name]
        route = lies.route and (lies.route.axis, lies.route.experts)
        sizes = [tuple(d.size for d in own) for own in self.lowered.dims[v.name]]
        trained = v.name in self.lowered.traced.trainable
        ahead = v.name in self.lowered.ahead
        return lies.with_route(None), route, tuple(sizes), trained, ahead


def few_layers(traced: Traced, plan: Plan) -> FewLayers | None:
    """The graph with few of the layers that do the same; None if it is not to be had,
    or the plan tells layers apart."""
    names = [*plan.hints, *(name for own in plan.op_shardings.values() for name in own)]
    if any(ONE_LAYER.search(name) for name in names):
        return None
    modules = (LAYER.search(n.location.module) for n in traced.graph.nodes)
    lists = Counter(m.string[: m.start(1)].rstrip(".") for m in modules if m)
    if not lists:
        return None
    path = lists.most_common(1)[0][0]
    trainable, autocast = traced.trainable, traced.autocast

    def note(v: Value) -> Hashable:
        return v.name in trainable, autocast.get(v.name)

    try:
        layered = Layered(traced.graph, path, traced.literals, note)
        kinds = [layered.kind(part) for part in range(FIRST, len(layered.parts) - 1)]
        repeats = longest(path, kinds)
        if repeats is None or repeats.times <= KEPT:
            return None
        return _Shortener(layered, repeats).few(traced)
    except NotAlike:
        return None


class _Shortener:
    """Leaves out layers: those of parts from `start` to before `end`."""

    def __init__(self, layered: Layered, repeats: Repeats) -> None:
        self.layered, self.repeats = layered, repeats
        self.first = FIRST + repeats.first
        self.start = self.first + (KEPT - 1) * repeats.period
        self.end = self.first + (repeats.times - 1) * repeats.period

    def few(self, traced: Traced) -> FewLayers:
        """The graph with fewer layers. Raises: NotAlike, if it reads one left out."""
        graph, parts = self.layered.graph, self.layered.parts
        nodes = [node for part in parts[: self.start] for node in part]
        nodes += (self.moved(node) for part in parts[self.end :] for node in part)
        sources = {
            v.name: name
            for v in (*graph.params, *graph.buffers)
            if (name := self.renamed(v.name)) is not None
        }

        def kept(values: Sequence[Value]) -> tuple[Value, ...]:
            own = (v for v in values if v.name in sources)
            return tuple(replace(v, name=sources[v.name]) for v in own)

        fixed = len(graph.outputs) - len(traced.updated)
        updated = {
            name: v
            for buffer, v in zip(traced.updated, graph.outputs[fixed:], strict=True)
            if (name := self.renamed(buffer)) is not None
        }
        few = replace(
            graph,
            params=kept(graph.params),
            buffers=kept(graph.buffers),
            nodes=tuple(nodes),
            outputs=(*map(self.now, graph.outputs[:fixed]), *updated.values()),
        ).verify()
        trainable = (sources.get(name) for name in traced.trainable)
        repeats = replace(
            self.repeats,
            first=self.repeats.first + self.repeats.period,
            times=self.repeats.times - (KEPT - 2),
        )
        made = replace(
            traced,
            graph=few,
            outputs=(*traced.outputs[: fixed - 1], *map(after_step, updated)),
            updated=tuple(updated),
            trainable=frozenset(name for name in trainable if name),
            joined={
                sources[v.name]: tuple(
                    self.renamed(name) or name for name in traced.joined[v.name]
                )
                for v in graph.params
                if v.name in traced.joined and v.name in sources
            },
        )
        return FewLayers(made, repeats)

    def moved(self, node: Node) -> Node:
        """A node behind the layers left out, as it reads values without them."""
        module = self.renamed(node.location.module)
        if module is None:
            raise NotAlike
        return node.substitute(self.now).in_module(module)

    def now(self, v: Value) -> Value:
        """The value that is read there in place of `v`."""
        if v.name not in self.layered.places:
            name = self.renamed(v.name)
            if name is None:
                raise NotAlike
            return replace(v, name=name)
        part, i = self.layered.places[v.name]
        if part < self.first or part >= self.end:
            return v
        part -= self.end - self.start
        if part < self.first:  # it stays, or is not the same number of layers before
            raise NotAlike
        return self.layered.made[part][i]

    def renamed(self, name: str) -> str | None:
        """A name as it is with fewer layers; None of one that is left out."""
        number = number_in(self.repeats.path, name)
        if number is None or FIRST + number < self.start:
            return name
        if FIRST + number < self.end:
            return None
        by = self.end - self.start
        return renumbered(self.repeats.path, name, number, number - by)
