"""chain: the way from the batch to the loss, node by node, and where it can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..checkpointed import is_checkpoint
from ..cost import NodeCosts, Seconds
from ..dims.origins import Origin
from ..errors import StageError
from ..graph import Node, Value
from ..shard.collectives import axes_of
from ..shard.insert_collectives import Lowered
from ..shard.parameter_sharding import GATHER
from ..stage.even_ranks import even_ranks
from ..stage.fuse import IDENTITIES
from ..stage.localize import Localizer


class Chain:
    """The nodes that lead from the batch and the parameters to the loss, in order."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        origins = lowered.origins
        self.nodes = [
            n
            for n in lowered.graph.nodes
            if n.results and origins[n.results[0].name] is Origin.BOTH
        ]
        plan = lowered.plan
        at_zero = dict.fromkeys(plan.axes, 0)
        self.local = Localizer(lowered.dims, lowered.shardings, plan.sizes, at_zero)
        # What does nothing at run time is done again where its result is read: what
        # crosses is its operand.
        self.sources: dict[str, str] = {}
        self.last_use: dict[str, int] = {}
        for i, node in enumerate(self.nodes):
            for v in node.operands:
                self.last_use[self.sources.get(v.name, v.name)] = i
            if node.op in IDENTITIES:
                (v,) = node.operands
                self.sources[node.out.name] = self.sources.get(v.name, v.name)
        self._crossings = self._find_crossings()

    def _find_gathers(self, costs: NodeCosts) -> list[list[Seconds]]:
        """Seconds of the gathers of parameters that are first read at each position.
        One that several modules read is gathered for each, as they may come to lie on
        several stages."""
        behind = self._behind()
        done: set[tuple[str, str]] = set()
        gathers: list[list[Seconds]] = []
        for reader in self.nodes:
            gathers.append([])
            for v in reader.operands:
                for name, node in behind.get(v.name, {}).items():
                    if (name, reader.location.module) not in done:
                        done.add((name, reader.location.module))
                        gathers[-1].append(costs.gather(self.local.node(node)))
        return gathers

    def _behind(self) -> dict[str, dict[str, Node]]:
        """Value made beside the chain -> the gathers of parameters that lead to it, by
        name."""
        plan, own = self.lowered.plan, {id(node) for node in self.nodes}
        behind: dict[str, dict[str, Node]] = {}
        for node in self.lowered.graph.nodes if plan.zero else ():
            if id(node) in own:
                continue
            gathers: dict[str, Node] = {}
            for v in node.operands:
                gathers |= behind.get(v.name, {})
            axes = axes_of(node) if node.op == GATHER else ()
            if set(axes) & set(plan.parameter_axes):
                gathers[node.out.name] = node
            behind |= {v.name: gathers for v in node.results}
        return behind

    def _find_crossings(self) -> list[tuple[Value, ...]]:
        """The values that are made before each position and read at or after it."""
        alive: dict[str, Value] = {}
        crossings: list[tuple[Value, ...]] = []
        for i, node in enumerate(self.nodes):
            for name in [n for n in alive if self.last_use.get(n, -1) < i]:
                del alive[name]
            crossings.append(tuple(alive.values()))
            if node.op not in IDENTITIES:
                alive.update((v.name, v) for v in node.results)
        return [*crossings, ()]

    def crossing(self, position: int) -> tuple[Value, ...]:
        """Values that cross a cut before the node at `position`."""
        return self._crossings[position]

    def main_value(self, position: int) -> Value:
        """The largest value across a position; of equal ones the last."""
        return max(reversed(self.crossing(position)), key=lambda v: v.bytes)

    def is_place(self, position: int) -> bool:
        """Whether a cut may be here: where one value crosses, and little beside it, or
        between layers, be it several (what all layers read of the first, encoded
        inputs; what is kept for later ones). What is to be summed up is little, as a
        loss of routers that layers add to."""
        if self.nodes[position - 1].op in IDENTITIES:
            return False  # the same as one position before
        crossing, lie = self.crossing(position), self.lowered.shardings
        if any(lie[v.name].route for v in crossing):
            return False  # how many rows are where depends on the data
        main = self.main_value(position)
        pending = sum(v.bytes for v in crossing if lie[v.name].pending)
        if lie[main.name].pending or 2 * pending > main.bytes:
            return False
        beside = sum(v.bytes for v in crossing) - main.bytes
        return 2 * beside <= main.bytes or self._is_border(position)

    def _is_border(self, position: int) -> bool:
        """Whether layers meet here: of the model, as parts of one loss need not be on
        several stages."""
        here, before = (self.nodes[i].location.layer for i in (position, position - 1))
        return here != before and not any(map(is_checkpoint, (here, before)))

    def begins(self, position: int, layer: str) -> bool:
        """Whether a layer, by its module path, begins here."""
        here, before = (self.nodes[i].location.layer for i in (position, position - 1))
        return here == layer != before

    @cached_property
    def _named(self) -> dict[str, int]:
        """Name of a cut in plans -> its position: where a layer begins, or behind the
        main value, or another that crosses no cut before it, as all layers may read one
        that is larger than what each makes."""
        every = [i for i in range(1, len(self.nodes)) if self.is_place(i)]
        layers = [(self.nodes[i].location.layer, i) for i in every]
        begin = [(layer, i) for layer, i in layers if self.begins(i, layer)]
        mains = [(self.main_value(i).name, i) for i in every]
        others = [
            (v.name, i)
            for i in every
            for v in sorted(self.crossing(i), key=lambda v: -v.bytes)
        ]
        # Of several that follow layers and are in none the last is meant.
        named: dict[str, int] = {name: i for name, i in begin if not name}
        for name, i in (*begin, *mains, *others):
            named.setdefault(name, i)
        return named

    @cached_property
    def _names(self) -> dict[int, str]:
        """Positions -> names of the cuts there."""
        names: dict[int, str] = {}
        for name in sorted(self._named, key=lambda name: not name):  # "" if no other
            names.setdefault(self._named[name], name)
        return names

    def cut_name(self, position: int) -> str:
        """What a plan calls a cut."""
        return self._names[position]

    def candidates(self, stages: int) -> list[int]:
        """Positions to cut at: borders of layers, or any if those are too few."""
        places = sorted(self._names)
        borders = [i for i in places if self._is_border(i)]
        return borders if len(borders) >= stages - 1 else places

    def balance(self, stages: int, costs: NodeCosts) -> list[int]:
        """The ends of the stages, the slowest stage being as fast as can be.

        Exact, by dynamic programming over the candidate cuts; among equals the one
        whose sum of squares is least. Where ranks run several stages, cuts then move
        until ranks are even, see `passes.stage.even_ranks`; but with few microbatches
        it is the way of each through all stages that takes the time.
        """
        places = [0, *self.candidates(stages), len(self.nodes)]
        if len(places) < stages + 1:
            most = (len(places) - 1) // self.lowered.plan.stages_per_rank
            raise StageError(
                f"the model has {len(places) - 2} places where one value crosses, with "
                f"little beside it, too few for {stages} stages",
                fix=f"use pp={max(1, most)} or less",
            )
        spent = [0.0]
        for node, gathers in zip(self.nodes, self._find_gathers(costs), strict=True):
            whole = sum(gathers, costs.seconds(self.local.node(node)))
            spent.append(spent[-1] + whole.total)
        sizes = [[self.local.value(v).bytes for v in self.crossing(p)] for p in places]
        send = [2 * costs.send(sum(own)) if own else 0.0 for own in sizes]  # and back

        def cost(i: int, j: int) -> float:
            return spent[places[j]] - spent[places[i]] + send[i] + send[j]

        # best[j]: (slowest stage, sum of squares, ends) of the stages up to place j.
        best: list[Any] = [(0.0, 0.0, ())] + [None] * (len(places) - 1)
        for _ in range(stages):
            new: list[Any] = [None] * len(places)
            for j in range(1, len(places)):
                for i in range(j):
                    if best[i] is None:
                        continue
                    slowest, squares, ends = best[i]
                    took = cost(i, j)
                    option = max(slowest, took), squares + took * took, (*ends, j)
                    if new[j] is None or option < new[j]:
                        new[j] = option
            best = new
        plan, ends = self.lowered.plan, best[-1][2]
        many = plan.microbatches >= 2 * plan.mesh.pipeline_ranks
        if plan.placement and plan.stages_per_rank > 1 and many:
            ends = even_ranks(ends, plan.placement, cost)
        return [places[end] for end in ends]

    def ends_of(self, cuts: Sequence[str]) -> list[int]:
        """Positions of the cuts that a plan names: by the value that crosses, or the
        layer that begins; "" after the last."""
        stages = self.lowered.plan.stages
        if len(cuts) != stages - 1:
            raise StageError(
                f"the plan has {len(cuts)} cuts, but {stages} stages need {stages - 1}",
                fix='write "cuts": [] to have them balanced',
            )
        ends: list[int] = []
        for name in cuts:
            end = self._named.get(name)
            if end is None or (ends and end <= ends[-1]):
                places = self.candidates(len(self.nodes))
                known = dict.fromkeys(map(self.cut_name, places))
                raise StageError(
                    f"the plan cuts at {name}, which is no place to cut in this model",
                    fix=f"cut at some of {', '.join(known)}, in this order",
                )
            # Later positions leave more of the views behind the value to the sender.
            ends.append(end)
        return [*ends, len(self.nodes)]
