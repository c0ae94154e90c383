"""op_sharding_costs: what shardings of ops cost on an axis, as tables for `least_cost`.

An op costs the seconds that its part takes; a value costs the collectives that bring it
from its producer's sharding to its consumers', each once for all that share it; what is
kept for the backward, and a share of a parameter, costs bytes. What other axes split is
given, and so is a byte's price in seconds: where memory is short it is high.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from ..cost import signature
from ..dims.name_dims import Factor, Place
from ..dims.origins import Origin
from ..graph import Node, Value
from ..ops.attention import passed_round, ring_of
from ..ops.op import is_view, op_of
from ..price.op_costs import op_parts
from ..search.least_cost import Table
from ..search.value_costs import NEVER, Amount, Setting, Use, ValueCosts
from ..shard.alternatives import alternative_of
from ..shard.hints import read_hints
from ..shard.op_sharding import PASS, Allowed, OpSharding, made_state, needed_state
from ..shard.plan_shardings import splittable
from ..shard.resharding import Need, P, R, State, V
from ..shard.sharding import Sharding


@dataclass(frozen=True)
class Choice:
    """What an axis may do with an op. varying: it is computed whole on each rank, and
    each uses the result for other work (state V)."""

    op_sharding: OpSharding
    varying: bool = False


@dataclass(frozen=True)
class Amounts:
    """What some nodes' choices cost together. values: [choices of each, ..., 3]."""

    nodes: tuple[int, ...]
    values: Tensor

    def weigh(self, byte: float) -> Table:
        """byte: the seconds that a byte is worth."""
        weights = torch.tensor([1.0, 1.0, byte], dtype=torch.float64)
        return Table(self.nodes, self.values @ weights)


class OpShardingCosts:
    """The choices of each node, and tables of what they cost."""

    def __init__(self, setting: Setting) -> None:
        self.setting, sharded = setting, setting.sharded
        self.axis, self.named, self.plan = setting.axis, sharded.named, sharded.plan
        self.nodes, self.flows = self.named.graph.nodes, setting.differentiable
        self.allowed = Allowed(setting.sizes, self.flows)
        self.pins = read_hints(self.named, self.plan)
        self.producer = {
            v.name: i for i, node in enumerate(self.nodes) for v in node.results
        }
        self.choices = [self._choices(i) for i in range(len(self.nodes))]
        self._known: dict[object, Tensor] = {}  # tables of equal values
        self._took: dict[object, float] = {}  # seconds of equal ops

    @cached_property
    def tables(self) -> list[Amounts]:
        """Costs of ops, of sums and of values."""
        return [*self._of_ops(), *self._of_sums(), *self._of_values()]

    # --- what may be chosen ---------------------------------------------------------

    def _choices(self, i: int) -> list[Choice]:
        """Lists a node's choices; None comes first."""
        node, axis = self.nodes[i], self.axis
        origin = self.named.origins[node.results[0].name]
        current = self.setting.sharded.op_shardings[i]
        if not origin & Origin.PARAM or self._is_decided(node):
            return [Choice(current[axis])]
        pinned = self.pins.factor(axis, node, self.named.factors[i])
        if pinned is not None:
            return [Choice(pinned)]
        others = {a: op_sharding for a, op_sharding in current.items() if a != axis}
        choices = [Choice(None)]
        if self._may_vary(origin) and len(node.results) == 1:
            choices.append(Choice(None, varying=True))
        for f in splittable(self.named, self.allowed, axis, i, others):
            way = alternative_of(node, f)
            if way is None or way.on_rank is not None:
                choices.append(Choice(f))
        if all(v.numel == 1 for v in node.results):
            choices.append(Choice(PASS))
        return choices

    def _is_decided(self, node: Node) -> bool:
        """Whether the plan says which of its ways an op takes."""
        ways = {way.name for way in op_of(node).alternatives if way.on_rank}
        wanted = {preference.only for preference in self.plan.preferences(self.axis)}
        return bool(ways) and (self.setting.decided or not ways.isdisjoint(wanted))

    def _may_vary(self, origin: Origin) -> bool:
        return origin is Origin.PARAM or self.axis in self.plan.data_axes

    def made(self, node: Node, v: Value, choice: Choice) -> State:
        """How a choice makes one of the node's results."""
        which = [out and out.name for out in node.outs].index(v.name)
        return V if choice.varying else made_state(choice.op_sharding, which)

    def need(self, node: Node, which: int, choice: Choice) -> Need:
        """How a choice needs an operand."""
        flows = node.op != "aten.detach.default" and any(
            v.name in self.flows for v in node.results
        )
        if choice.varying:
            return Need(V, flows=flows)
        need = needed_state(node, which, self.axis, choice.op_sharding)
        return need._replace(flows=flows)

    # --- seconds of ops ---------------------------------------------------------------

    def _of_ops(self) -> Iterator[Amounts]:
        for i, node in enumerate(self.nodes):
            if not self.named.origins[node.results[0].name] & Origin.PARAM:
                continue
            trained = any(v.name in self.flows for v in node.results)
            parts = [self._part(i, choice) for choice in self.choices[i]]
            rows = [
                (
                    self._op_seconds(part, trained),
                    self._exchange_seconds(part, trained),
                    0.0,
                )
                for part in parts
            ]
            yield Amounts((i,), torch.tensor(rows, dtype=torch.float64))

    def _op_seconds(self, part: Node, trained: bool) -> float:
        """Returns the seconds of a rank's part of an op and its derivative, without
        communication."""
        key = signature(part), *(v.type for v in part.results), trained
        if key not in self._took:
            parts = op_parts(part, self.flows, self.setting.device, trained, {})
            self._took[key] = sum(cost.seconds for cost in parts.values())
        return self._took[key]

    def _exchange_seconds(self, part: Node, trained: bool) -> float:
        """Returns the seconds of what ranks exchange while an op runs."""
        if ring_of(part) != self.axis:
            return 0.0
        sent = [
            m for back in (False, True)[: 1 + trained] for m in passed_round(part, back)
        ]
        link = self.setting.link
        return sum(
            calls * link.seconds("send", size / calls) for _, calls, size in sent
        )

    def _part(self, i: int, choice: Choice) -> Node:
        """What the axis's first rank computes of an op."""
        node, sharded = self.nodes[i], self.setting.sharded
        op_sharding = choice.op_sharding
        operands = op_sharding.operands if isinstance(op_sharding, Factor) else ()
        results = op_sharding.outs if isinstance(op_sharding, Factor) else ()
        mine = [
            self._local(v, lies, operands, k)
            for k, (v, lies) in enumerate(
                zip(node.operands, sharded.needs[i], strict=True)
            )
        ]
        outs = tuple(
            v and self._local(v, sharded.states[v.name], results, k)
            for k, v in enumerate(node.outs)
        )
        rest = iter(mine)
        part = replace(node.substitute(lambda _: next(rest)), outs=outs)
        way = alternative_of(node, op_sharding)
        if way is None or way.on_rank is None:
            return part
        return way.on_rank(node, part, self.axis, self.setting.sizes[self.axis])

    def _local(
        self, v: Value, lies: Sharding, places: Sequence[Place], which: int
    ) -> Value:
        """The first rank's part of an operand or result. places: what the axis splits,
        of which operand or result."""
        own = next(((d, f) for spot, d, f in places if spot == which), None)
        return replace(v, shape=self.setting.local_shape(v, lies, own))

    # --- sums that stay pending -------------------------------------------------------

    def _of_sums(self) -> Iterator[Amounts]:
        """An op passes a pending sum if it may; propagate leaves no choice there."""
        for i, node in enumerate(self.nodes):
            if Choice(PASS) not in self.choices[i]:
                continue
            makers = [self.producer.get(v.name) for v in node.operands]
            scope = (*dict.fromkeys(m for m in makers if m is not None), i)
            shape = [len(self.choices[j]) for j in scope]
            values = torch.zeros([*shape, 3], dtype=torch.float64)
            for spots in product(*map(range, shape)):
                at = dict(zip(scope, spots, strict=True))
                pending = [
                    m is not None
                    and self.made(self.nodes[m], v, self.choices[m][at[m]]) == P
                    for m, v in zip(makers, node.operands, strict=True)
                ]
                passes = any(pending) and self.allowed.may_pass(
                    self.axis, node, pending
                )
                if passes != (self.choices[i][at[i]].op_sharding == PASS):
                    values[spots] = torch.tensor(NEVER, dtype=torch.float64)
            yield Amounts(scope, values)

    # --- values: collectives and memory -----------------------------------------------

    def _of_values(self) -> Iterator[Amounts]:
        uses: dict[str, dict[int, list[int]]] = {}
        for i, node in enumerate(self.nodes):
            for which, v in enumerate(node.operands):
                uses.setdefault(v.name, {}).setdefault(i, []).append(which)
        for v in self.named.graph.params:
            if v.name in uses:
                yield self._of_value(v, uses[v.name], None)
        for i, node in enumerate(self.nodes):
            if self.named.origins[node.results[0].name] & Origin.PARAM:
                for v in node.results:
                    if v.name in uses:
                        yield self._of_value(v, uses[v.name], i)

    def _of_value(
        self, v: Value, uses: dict[int, list[int]], producer: int | None
    ) -> Amounts:
        """A table over a value's producer and all of its consumers."""
        wanted = []
        for i, positions in uses.items():
            node, own = self.nodes[i], self.choices[i]
            needs = [
                tuple(self.need(node, p, choice) for p in positions) for choice in own
            ]
            wanted.append([(need, self._keeps(v, node)) for need in needs])
        if producer is None:
            haves: list[tuple[State, bool]] = [(R, False)]
        else:
            node = self.nodes[producer]
            origin = self.named.origins[v.name]
            can_vary = self._may_vary(origin) and len(node.results) == 1
            haves = [
                (self.made(node, v, c), can_vary and c.op_sharding is None)
                for c in self.choices[producer]
            ]
        pricing = ValueCosts(self.setting, v, producer is None)
        key = (pricing.signature, tuple(haves), tuple(map(tuple, wanted)))
        if key not in self._known:
            self._known[key] = _spread(haves, wanted, pricing)
        values = self._known[key]
        if producer is None:
            return Amounts(tuple(uses), values[0])
        return Amounts((producer, *uses), values)

    def _keeps(self, v: Value, node: Node) -> bool:
        """Whether the node's backward reads this operand, or a view that it makes of
        it is read."""
        residuals = self.setting.residuals
        if is_view(node):
            return any(out.name in residuals for out in node.results)
        return v.name in residuals and op_of(node).linear != "jointly"


def _spread(
    haves: Sequence[tuple[State, bool]],
    wanted: Sequence[Sequence[Use]],
    price: Callable[[tuple[State, bool], Sequence[Use]], Amount],
) -> Tensor:
    """A table over choices of a producer and of each consumer. What it costs depends on
    which uses there are, not on who has which: a set of them is priced once, and there
    are few sets where there are a million of choices."""
    sets: list[tuple[Use, ...]] = [()]
    which = torch.tensor(0)  # over the choices of the consumers so far
    for own in wanted:
        longer = [s if use in s else (*s, use) for s in sets for use in own]
        first = {frozenset(s): s for s in reversed(longer)}
        index = {key: i for i, key in enumerate(first)}
        table = torch.tensor([index[frozenset(s)] for s in longer])
        which = table.reshape(len(sets), len(own))[which]
        sets = [*first.values()]
    amounts = {have: [price(have, s) for s in sets] for have in dict.fromkeys(haves)}
    rows = [amounts[have] for have in haves]
    return torch.tensor(rows, dtype=torch.float64)[:, which]
