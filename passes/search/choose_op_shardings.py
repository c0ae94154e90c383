"""choose_op_shardings: for all ops what the axes of a plan split, within memory.

On one axis they are the best there are (`passes.search.least_cost`), given what the
other axes split; each axis is decided again until nothing changes. A limit of memory
becomes a price of bytes, the lowest with which they fit (Everett 1963): of all that
need as little they are the fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch

from ..dims.name_dims import Factor, Named
from ..dims.origins import Origin
from ..errors import AutoparError
from ..layers import Layers, number_in
from ..mesh import TIME, Mesh
from ..ops.memory import find_owners
from ..ops.op import is_view
from ..plan import Plan, PlanError
from ..price.cluster import Cluster
from ..search.least_cost import (
    Block,
    Chosen,
    Table,
    TooEntangled,
    least_cost,
    owns,
)
from ..search.op_sharding_costs import Amounts, Choice, OpShardingCosts
from ..search.value_costs import MEMORY, Setting
from ..shard.insert_collectives import insert_collectives
from ..shard.plan_shardings import OpName, fold, name_ops, sharding_text
from ..shard.propagate import propagate
from ..stage.differentiate import differentiate
from ..stage.split_stages import split_stages

CHEAPEST, DEAREST = 1e-18, 1e-3  # seconds that a byte may be worth
NEAR = 1e-7  # of a price: how near to it the next ones are that are tried
STEPS = 30  # prices that are looked for
TIE = 1e-12  # seconds: between shardings that cost the same the plan's order decides
ROUNDS = 5


class ShardingsDoNotFit(AutoparError):
    """Whatever the axes split, a rank needs more memory than there is."""


@dataclass(frozen=True)
class AxisShardings:
    """op_shardings: op -> dim, as plans have them, of the whole model; of_graph: of the
    graph alone. Seconds of one microbatch, with its share of the step's end; memory:
    bytes of parameters with their gradients and optimizer state, and of what is kept.
    """

    op_shardings: Mapping[str, str | None]
    of_graph: Mapping[str, str | None]
    compute: float
    communication: float
    memory: float

    @property
    def seconds(self) -> float:
        return self.compute + self.communication


class Axis:
    """The choices of one axis, for any price of bytes. layers: that repeat, if any."""

    def __init__(self, setting: Setting, layers: Layers | None = None) -> None:
        self.costs, self.layers = OpShardingCosts(setting), layers
        self.named, self.axis = self.costs.named, setting.axis
        self.names = name_ops(self.named.graph)
        self.sizes = [len(own) for own in self.costs.choices]

    def best(self, byte: float = 0.0) -> AxisShardings:
        """The cheapest op shardings, with a byte worth `byte` seconds."""
        return self._shardings_of(self._chosen(byte))

    def _chosen(self, byte: float = 0.0) -> Chosen:
        tables = [amounts.weigh(byte) for amounts in self.costs.tables]
        try:
            return least_cost([*tables, *self.ties], self.sizes, self.block)
        except TooEntangled as error:
            raise PlanError(
                f"what '{self.axis}' splits of ops cannot be decided: {error}",
                fix="leave the op shardings out",
            ) from error

    def within(self, limit: float) -> AxisShardings:
        """The fastest that need no more bytes, as far as prices tell."""
        heavy = self._chosen()
        if self._memory(heavy) <= limit:
            return self._shardings_of(heavy)
        light = self._chosen(DEAREST)
        if (memory := self._memory(light)) > limit:
            raise ShardingsDoNotFit(
                f"whatever '{self.axis}' splits, a rank needs "
                f"{memory / 1e9:.3g} GB, and has {limit / 1e9:.3g} GB",
                fix="use more ranks, more microbatches, zero, or recompute",
            )
        for _ in range(STEPS):
            # Costs are lines over the price, and the least of them are concave: what is
            # better than both anywhere is so where these two meet.
            price = self._crossing(heavy, light)
            above = self._chosen(price * (1 + NEAR))
            if self._memory(above) > limit:
                heavy = above
                continue
            light = above
            below = self._chosen(price * (1 - NEAR))
            if self._memory(below) > limit or price == CHEAPEST:
                break
            light = below
        return self._shardings_of(light)

    def _crossing(self, heavy: Chosen, light: Chosen) -> float:
        """The price of a byte at which two choices cost the same."""
        (*spent, more), (*other, less) = map(self._totals, (heavy, light))
        return max(CHEAPEST, float((sum(other) - sum(spent)) / (more - less)))

    @cached_property
    def ties(self) -> list[Table]:
        """Tiny costs that prefer a plan's first choices among equal ones."""
        order = self.costs.plan.split.get(self.axis, ())
        tables = []
        for i, own in enumerate(self.costs.choices):
            ranks = [self._rank(order, choice) for choice in own]
            costs = TIE * torch.tensor(ranks, dtype=torch.float64)
            tables.append(Table((i,), costs))
        return tables

    @staticmethod
    def _rank(order: Sequence[str], choice: Choice) -> int:
        if not isinstance(choice.op_sharding, Factor):
            return len(order)
        name = choice.op_sharding.dim.name
        return order.index(name) if name in order else len(order) + 1

    # --- runs of layers ---------------------------------------------------------------

    @cached_property
    def block(self) -> Block | None:
        """The middle one of three runs, which stands for all but the first and last."""
        if self.layers is None or self.layers.repeats < 3:
            return None
        modules = [node.location.module for node in self.costs.nodes]
        run = [self.layers.repeat_of(module) for module in modules]
        spans = [{run[i] for i in a.nodes} - {None} for a in self.costs.tables]
        if max((r for r in run if r is not None), default=0) != 2:
            return None  # its ops are not those of layers
        met: list[set[OpName]] = [set(), set()]  # next runs, as names in the first
        for amounts, span in zip(self.costs.tables, spans, strict=True):
            if {0, 2} <= span:
                raise PlanError(
                    f"layers of '{self.layers.path}' share "
                    f"{self.names[amounts.nodes[0]]}, so each cannot be decided alone",
                    fix="leave the op shardings out",
                )
            for first in (0, 1):
                if span == {first, first + 1}:
                    met[first] |= {
                        self.shifted(self.names[i], -first)
                        for i in amounts.nodes
                        if run[i] == first
                    }
        index = {name: i for i, name in enumerate(self.names)}
        ends = sorted(met[0] | met[1], key=index.__getitem__)
        return Block(
            frozenset(i for i, r in enumerate(run) if r == 1),
            tuple(index[name] for name in ends),
            tuple(index[self.shifted(name, 1)] for name in ends),
            self.layers.repeats - 2,
        )

    def shifted(self, name: OpName, runs: int) -> OpName:
        """The op's name `runs` runs later, if it is in one."""
        assert self.layers is not None
        number = number_in(self.layers.path, name.module)
        if number is None:
            return name
        return name.in_layer(number + runs * self.layers.period)

    # --- the answer -----------------------------------------------------------------

    def _shardings_of(self, chosen: Chosen) -> AxisShardings:
        block, op_shardings = self.block, {}
        of_graph = self._texts({**chosen.choices, **(chosen.copies or [{}])[0]})
        if block is None:
            op_shardings = of_graph
        else:
            assert self.layers is not None
            inside = {self.names[i] for i in block.inner}
            texts_of: dict[int, dict[OpName, str | None]] = {}
            for k, copy in enumerate(chosen.copies):
                if id(copy) not in texts_of:  # equal copies are one
                    texts = self._texts(copy)
                    own = {n: t for n, t in texts.items() if n in inside}
                    texts_of[id(copy)] = own
                op_shardings |= {
                    self.shifted(n, k): t for n, t in texts_of[id(copy)].items()
                }
            late = self.layers.repeats - 3  # how much later the third run is
            op_shardings |= {
                self.shifted(n, late * (self.layers.repeat_of(n.module) == 2)): t
                for n, t in self._texts(chosen.choices).items()
                if n not in inside
            }
        rows = reversed([*enumerate(self.names)])
        place = {name.in_layer("*"): i for i, name in rows}
        order = sorted(op_shardings, key=lambda name: place[name.in_layer("*")])
        folded = fold({name: op_shardings[name] for name in order})
        texts_of_graph = {str(name): text for name, text in of_graph.items()}
        return AxisShardings(folded, texts_of_graph, *self._totals(chosen).tolist())

    def _texts(self, choices: Mapping[int, int]) -> dict[OpName, str | None]:
        """Returns the shardings of the ops for which these are a decision."""
        texts = {}
        for i, spot in choices.items():
            first = self.costs.nodes[i].results[0].name
            chosen = self.costs.choices[i][spot].op_sharding
            if self.named.origins[first] & Origin.PARAM and not isinstance(chosen, str):
                texts[self.names[i]] = sharding_text(self.named.factors[i], chosen)
        return texts

    def _memory(self, chosen: Chosen) -> float:
        return float(self._totals(chosen)[MEMORY])

    def _totals(self, chosen: Chosen) -> torch.Tensor:
        """Seconds and bytes of all runs, in the order of `AxisShardings`."""
        block = self.block
        if block is None:
            return self._total(self.costs.tables, chosen.choices)
        own = [a for a in self.costs.tables if owns(block, a.nodes)]
        others = [a for a in self.costs.tables if not owns(block, a.nodes)]
        totals = self._total(others, chosen.choices)
        for copy, same in groupby(chosen.copies):
            totals = totals + len([*same]) * self._total(own, copy)
        return totals

    def _total(
        self, tables: Sequence[Amounts], choices: Mapping[int, int]
    ) -> torch.Tensor:
        spots = (a.values[tuple(choices[i] for i in a.nodes)] for a in tables)
        return sum(spots, torch.zeros(3, dtype=torch.float64))


# --- all axes -------------------------------------------------------------------------


@dataclass(frozen=True)
class ChosenShardings:
    """plan: with op shardings of the whole model; of_graph: of the graph alone.
    by_axis: axis -> its op shardings, once those of the others were decided."""

    plan: Plan
    of_graph: Plan
    by_axis: Mapping[str, AxisShardings]


class OpenPlan:
    """A plan whose op shardings are open, for the axes that do not split the batch.

    decided: see `passes.search.value_costs.Setting`. Raises: PlanError.
    """

    def __init__(
        self,
        named: Named,
        plan: Plan,
        cluster: Cluster,
        layers: Layers | None = None,
        decided: bool = False,
    ) -> None:
        if plan.mesh.size > cluster.devices:
            raise PlanError(
                f"mesh '{plan.mesh}' needs {plan.mesh.size} devices, {cluster} has "
                f"{cluster.devices}",
                fix="describe the whole cluster",
            )
        self.named, self.cluster, self.layers = named, cluster, layers
        self.plan, self.decided = replace(plan, op_shardings={}), decided
        self.residuals = find_residuals(named, plan)
        self._known: list[tuple[str, Mapping[str, object], Axis]] = []

    def choose(self, limit: float | None = None) -> ChosenShardings:
        """Choose for all axes.

        limit: bytes that a rank may use; None: the plan's memory, else that of a
        device. Raises: ShardingsDoNotFit, TooEntangled, PlanError.
        """
        own = self.plan.memory or self.cluster.device.memory
        whole = self.plan.mesh.pipeline_ranks * (own if limit is None else limit)
        chosen: dict[str, AxisShardings] = {}
        done: list[Mapping[str, AxisShardings]] = []
        here = there = self.plan
        axes = [a for a in here.axes if a not in (TIME, *here.data_axes)]
        for _ in range(ROUNDS):
            for axis in axes:
                chosen[axis] = self._axis(axis, here).within(whole)
                here = _with(here, axis, chosen[axis].of_graph)
                there = _with(there, axis, chosen[axis].op_shardings)
            if chosen in done or len(axes) < 2:
                break
            done.append(dict(chosen))
        return ChosenShardings(there, here, chosen)

    def _axis(self, axis: str, here: Plan) -> Axis:
        """The problem of an axis, given the op shardings on the other axes."""
        others = {a: own for a, own in here.op_shardings.items() if a != axis}
        for name, beside, known in self._known:
            if name == axis and beside == others:
                return known
        setting = Setting(
            propagate(self.named, here),
            axis,
            self.cluster.device.running(here.tf32, here.backend),
            self.cluster.link(here.mesh, (axis,)),
            self.residuals,
            min(here.microbatches, here.mesh.pipeline_ranks),
            self.decided,
        )
        self._known.append((axis, others, Axis(setting, self.layers)))
        return self._known[-1][-1]


def _with(plan: Plan, axis: str, own: Mapping[str, str | None]) -> Plan:
    return replace(plan, op_shardings={**plan.op_shardings, axis: dict(own)})


def find_residuals(named: Named, plan: Plan) -> dict[str, str]:
    """The values that one device would keep from forward to backward, and those that
    they are views of -> the value whose storage they show."""
    # What `auto` computes again is decided later, for what op shardings leave.
    policy = "none" if plan.recompute == "auto" else plan.recompute
    alone = Plan(Mesh(()), recompute=policy)
    lowered = insert_collectives(propagate(named, alone))
    (stage,) = split_stages(lowered).stages
    local = differentiate(stage, {}, {}, stage.policies(alone))
    origins = lowered.origins
    own = [n for n in lowered.graph.nodes if origins[n.results[0].name] & Origin.PARAM]
    residuals = {v.name for v in local.residuals}
    names = {  # a stage gives names of its own
        v.name
        for node, renamed in zip(own, stage.forward, strict=True)
        for v, new in zip(node.results, renamed.results, strict=True)
        if new.name in residuals
    }
    for node in reversed(named.graph.nodes):
        if is_view(node) and any(v.name in names for v in node.results):
            names.add(node.operands[0].name)
    owners = find_owners(named.graph.nodes)
    return {name: owners.get(name, name) for name in names}
