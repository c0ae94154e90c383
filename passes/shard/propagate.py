"""propagate: from the plan's few decisions to a sharding for every value.

For each op and each axis one thing is decided: which of the dims that flow through the
op the axis splits, if any (its *op sharding*). The op's rule then says how its operands
must lie and how its results do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..dims.name_dims import Dim, Factor, Named
from ..dims.origins import Origin, find_differentiable
from ..graph import Graph, InvalidGraph, Node, Value, bare
from ..mesh import TIME
from ..ops.linearity import is_jointly_linear
from ..ops.op import op_of
from ..plan import WEIGHTS, Plan, Preference
from ..shard.alternatives import alternative_factors, alternative_of
from ..shard.check_states import check_sharding, check_shardings
from ..shard.count_rows import find_counts
from ..shard.hints import Pins, read_hints
from ..shard.op_sharding import PASS, Allowed, OpSharding, made_state, needed_state
from ..shard.parameter_sharding import find_casts, parameter_sharding
from ..shard.plan_shardings import planned_factor, read_plan_shardings
from ..shard.ring import check_rings
from ..shard.routed import route_of
from ..shard.separable import check_loss, check_op
from ..shard.settle_varying import settle_varying
from ..shard.sharding import Route, Sharding


@dataclass(frozen=True)
class Sharded:
    """Every value has a sharding that the rule of its op allows.

    op_shardings: for each node, axis -> the factor it splits, PASS, or None: not split.
    states: value name -> how it is made. needs: for each node, how each operand must
    lie. ahead: names of values of the batch alone that are needed whole; every rank
    computes them itself, before the loop over microbatches. counts: those of them that
    it adds up of its own rows, and then of all ranks'.
    """

    named: Named
    plan: Plan
    op_shardings: tuple[Mapping[str, OpSharding], ...]
    states: Mapping[str, Sharding]
    needs: tuple[tuple[Sharding, ...], ...]
    ahead: frozenset[str]
    counts: Mapping[str, Dim]

    @property
    def graph(self) -> Graph:
        return self.named.graph

    def text(self, value: Value) -> str:
        return self.states[value.name].exact_text(self.named.dims[value.name])

    def verify(self) -> Sharded:
        """Checks that shardings fit their values, and that every node has its own."""
        self.graph.verify()
        self.named.verify()
        check_shardings(self.graph, self.named.dims, self.states, self.plan)
        rows = zip(self.graph.nodes, self.needs, self.op_shardings, strict=True)
        for node, needs, op_shardings in rows:
            for v, need in zip(node.operands, needs, strict=True):
                check_sharding(v, self.named.dims[v.name], need, self.plan)
            if set(op_shardings) != set(self.plan.axes):
                raise InvalidGraph(f"{node} is sharded on {sorted(op_shardings)}")
        return self

    def __str__(self) -> str:
        return self.graph.text(self.text)


def propagate(named: Named, plan: Plan) -> Sharded:
    """Give every value a sharding, following the plan's order of preference.

    Where the plan has a sharding for an op, these count; hints count more than both.
    Raises: HintError, ShardingConflict, LossNotSeparable, BatchError, PlanError.
    """
    pins = read_hints(named, plan)
    counts = find_counts(named, plan)
    ahead: frozenset[str] = frozenset()
    while True:
        swept = _Propagation(named, plan, pins, ahead, counts).run()
        if swept.wanted_ahead <= ahead:
            break
        ahead = _with_ancestors(named, ahead | swept.wanted_ahead, counts)
    check_rings(named, plan, swept.op_shardings, swept.planned.keys())
    if TIME in plan.axes:
        check_loss(named, swept.states, swept.op_shardings, plan.microbatches)
    return Sharded(
        named,
        plan,
        tuple(swept.op_shardings),
        swept.states,
        tuple(settle_varying(named, plan, swept.states, swept.needs)),
        ahead,
        {name: dim for name, dim in counts.items() if name in ahead},
    )


def _with_ancestors(
    named: Named, wanted: frozenset[str], counts: Collection[str]
) -> frozenset[str]:
    grown = set(wanted)
    for node in reversed(named.graph.nodes):
        if any(v.name in grown and v.name not in counts for v in node.results):
            grown.update(
                v.name for v in node.operands if named.origins[v.name] is Origin.INPUT
            )
    return frozenset(grown)


class _Propagation:
    """One sweep over the graph with a fixed set of values computed ahead."""

    def __init__(
        self,
        named: Named,
        plan: Plan,
        pins: Pins,
        ahead: frozenset[str],
        counts: Collection[str],
    ) -> None:
        self.named, self.plan, self.pins, self.ahead = named, plan, pins, ahead
        self.counts = counts
        self.order = list(plan.axes)
        self.sizes = plan.sizes
        self.rank = {
            axis: {wanted: i for i, wanted in enumerate(plan.preferences(axis))}
            for axis in plan.axes
        }  # order of preference
        flows = find_differentiable(named.graph, named.traced.trainable)
        self.allowed = Allowed(self.sizes, flows)
        self.planned = read_plan_shardings(named, plan)
        self.states: dict[str, Sharding] = {}
        self.op_shardings: list[Mapping[str, OpSharding]] = []
        self.needs: list[tuple[Sharding, ...]] = []
        self.wanted_ahead: frozenset[str] = frozenset()

    def run(self) -> _Propagation:
        graph, dims = self.named.graph, self.named.dims
        for v in graph.sources:
            self.states[v.name] = Sharding.whole(dims[v.name])
        for i, node in enumerate(graph.nodes):
            op_shardings = self.choose(i, node)
            self.op_shardings.append(op_shardings)
            route = route_of(node, op_shardings, self.states)
            for which, out in enumerate(node.outs):
                if out is not None:
                    self.states[out.name] = self.made(out, which, op_shardings, route)
            self.needs.append(
                tuple(
                    self.needed(node, which, v, op_shardings, route)
                    for which, v in enumerate(node.operands)
                )
            )
        self.shard_parameters()
        return self

    # --- which dim an op splits ----------------------------------------------------

    def choose(self, i: int, node: Node) -> dict[str, OpSharding]:
        origin = self.named.origins[node.results[0].name]
        if origin is Origin.CONSTANT:
            return dict.fromkeys(self.order)
        if origin is Origin.INPUT:
            return self.choose_for_inputs(node, self.named.factors[i])
        op_shardings: dict[str, OpSharding] = {}
        for axis in self.order:
            pending = [
                self.states[v.name].pending_on(axis) == "sum" for v in node.operands
            ]
            passes = self.allowed.may_pass(axis, node, pending)
            if any(pending) and (passes or self.shares_out(axis, node, pending)):
                op_shardings[axis] = PASS
            else:
                op_shardings[axis] = self.wanted(axis, i, node, op_shardings)
            if axis == TIME:
                check_op(self.named, self.states, node, op_shardings[axis])
        return op_shardings

    def choose_for_inputs(
        self, node: Node, factors: tuple[Factor, ...]
    ) -> dict[str, OpSharding]:
        """Values of the batch alone are cheap: split along the batch, else whole.

        One that sums over the batch, or needs it whole, is computed ahead on the whole
        batch, which every rank has: no collective, and right for every microbatch.
        """
        op_shardings: dict[str, OpSharding] = dict.fromkeys(self.order)
        if node.results[0].name in self.ahead:
            return op_shardings
        for axis in self.plan.data_axes:
            op_sharding = self.preferred(axis, factors, op_shardings, node)
            if isinstance(op_sharding, Factor) and op_sharding.role == "map":
                op_shardings[axis] = op_sharding
            else:
                self.want_ahead(node.results)
                return dict.fromkeys(self.order)
        return op_shardings

    def shares_out(self, axis: str, node: Node, pending: list[bool]) -> bool:
        """Whether microbatches, which complete no sum, may each take their share of
        what else an op adds to sums, or puts beside them: of what has no samples."""
        alike = (
            v.dtype.is_floating_point and self.states[v.name].place(axis) is None
            for v in node.operands
        )
        each = all(p or a for p, a in zip(pending, alike, strict=True))
        return axis == TIME and is_jointly_linear(node) and each

    def want_ahead(self, values: tuple[Value, ...]) -> None:
        self.wanted_ahead |= {v.name for v in values}

    def wanted(
        self, axis: str, i: int, node: Node, op_shardings: Mapping[str, OpSharding]
    ) -> Factor | None:
        """The factor that an axis should split: by a hint, the plan, or preference."""
        factors = self.named.factors[i]
        pinned = self.pins.factor(axis, node, factors)
        planned = self.planned.get((node.results[0].name, axis))
        if pinned is None and planned is not None:
            return planned_factor(
                self.named, self.allowed, axis, i, op_shardings, planned
            )
        return pinned or self.preferred(axis, factors, op_shardings, node)

    def preferred(
        self,
        axis: str,
        factors: tuple[Factor, ...],
        op_shardings: Mapping[str, OpSharding],
        node: Node,
    ) -> Factor | None:
        order, op = self.rank[axis], bare(node.op)
        others = alternative_factors(node, factors, self.allowed, op_shardings)
        choices = [
            *((only, f) for f in factors for only in ("", op, WEIGHTS)),
            *((f.role, f) for f in others),
        ]
        ranked = [
            (order[wanted], f)
            for only, f in choices
            if (wanted := Preference(f.dim.name, only)) in order
            and (only != WEIGHTS or self.meets(axis, f, node))
            and self.allowed.may_split(f, node)
            and self.allowed.divides(axis, f.dim, op_shardings)
        ]
        return min(ranked, key=lambda r: r[0])[1] if ranked else None

    def meets(self, axis: str, f: Factor, node: Node) -> bool:
        """Whether weights meet tokens along this dim here, or have before (the axis
        already splits an operand along it), or are turned to."""
        origins = {
            self.named.origins[node.operands[which].name] is Origin.PARAM
            for which, _, _ in f.operands
        }
        split = any(
            self.states[node.operands[which].name].place(axis) == (d, i)
            for which, d, i in f.operands
        )
        # As views of weights are split that meet them later, turned for a product.
        turned = origins == {True} and op_of(node).view == "order"
        return f.role == "map" and (split or turned or origins == {True, False})

    # --- what follows from it ------------------------------------------------------

    def made(
        self,
        v: Value,
        which: int,
        op_shardings: Mapping[str, OpSharding],
        route: Route | None,
    ) -> Sharding:
        lies = Sharding.whole(self.named.dims[v.name])
        for axis in self.order:
            lies = lies.with_state(
                axis, made_state(op_shardings[axis], which), self.order
            )
        return _with_rows(lies, route)

    def needed(
        self,
        node: Node,
        which: int,
        v: Value,
        op_shardings: Mapping[str, OpSharding],
        route: Route | None,
    ) -> Sharding:
        if node.results[0].name in self.counts:
            return self.states[v.name]  # `RowCounter` takes what it needs of it
        state = Sharding.whole(self.named.dims[v.name])
        for axis in self.order:
            need = needed_state(node, which, axis, op_shardings[axis])
            own = need.of(self.states[v.name].state(axis))
            state = state.with_state(axis, own, self.order)
        if self.named.origins[v.name] is Origin.INPUT and v.name not in self.ahead:
            have = self.states[v.name]
            lacks = [a for a in self.order if have.place(a) != state.place(a)]
            if any(have.place(a) for a in lacks):
                self.want_ahead((v,))
        ways = (alternative_of(node, own) for own in op_shardings.values())
        beside = {place for way in ways if way for place, _ in way.beside}
        # What is split beside rows has none, as weights of experts.
        return state if which in beside else _with_rows(state, route)

    def shard_parameters(self) -> None:
        """Shards parameters between their uses, and their casts alike."""
        uses: dict[str, list[Sharding]] = {}
        nodes = self.named.graph.nodes
        casts = find_casts(nodes, self.named.graph.params)
        for node, needs in zip(nodes, self.needs, strict=True):
            if node.results[0].name in casts:
                continue
            for v, need in zip(node.operands, needs, strict=True):
                if self.named.origins[v.name] is Origin.PARAM:
                    uses.setdefault(casts.get(v.name, v.name), []).append(need)
        for v in self.named.graph.params:
            dims, own = self.named.dims[v.name], uses.get(v.name, [])
            self.states[v.name] = parameter_sharding(
                dims, own, self.plan, v.name in uses
            )
        for i, node in enumerate(nodes):
            if (out := node.results[0].name) in casts:
                self.states[out] = self.states[casts[out]]
                self.needs[i] = (self.states[out],)


def _with_rows(state: Sharding, route: Route | None) -> Sharding:
    """Rows where their experts are, if it has any that the axis splits."""
    has_rows = route is not None and state.place(route.axis) is not None
    return state.with_route(route) if has_rows else state
