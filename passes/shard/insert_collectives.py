"""insert_collectives: make every move between shardings an op of the graph.

What a move takes on each axis `passes.shard.resharding` says; here is decided which
axis goes first. A value that is moved for one consumer is shared by all that want it
so: its cotangents then add up locally before the one collective of the backward. What
copies of a smaller value are made of is moved instead of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod

from ..builder import prune
from ..dims.name_dims import Dims, Factor
from ..dims.origins import Origin, find_differentiable, find_origins
from ..errors import LossNotSeparable
from ..graph import Graph, Location, Node, Value
from ..mesh import TIME
from ..ops.experts import COMBINE, DISPATCH
from ..ops.op import is_method
from ..plan import Plan
from ..shard.check_states import check_shardings, check_states
from ..shard.count_rows import RowCounter
from ..shard.emit_resharding import ReshardEmitter
from ..shard.fuse_collectives import fuse_collectives
from ..shard.hoist_reshards import before_view
from ..shard.propagate import Sharded
from ..shard.resharding import R, Step, V, transition
from ..shard.routed import Ways
from ..shard.separable import outputs_of
from ..shard.sharding import Sharding
from ..traced import Traced


@dataclass(frozen=True)
class Lowered:
    """A graph in which every operand lies as its op needs it.

    Values have their global shapes; `shardings` says which part of it a rank holds.
    ahead: values computed once a step, before the loop over microbatches.
    """

    traced: Traced
    plan: Plan
    graph: Graph
    dims: Mapping[str, Dims]
    shardings: Mapping[str, Sharding]
    origins: Mapping[str, Origin]
    ahead: frozenset[str]

    def text(self, value: Value) -> str:
        """`[batch/dp, seq/tp, embed]`, the shape being global."""
        return self.shardings[value.name].exact_text(self.dims[value.name])

    def verify(self) -> Lowered:
        """Checks shapes, shardings and states, and that the loss is summed over
        time."""
        self.graph.verify()
        check_shardings(self.graph, self.dims, self.shardings, self.plan)
        loss = self.graph.outputs[0]
        split = self.shardings[loss.name].place(TIME)
        assert split is None, f"the loss %{loss.name} is split over microbatches"
        flows = find_differentiable(self.graph, self.traced.trainable)
        check_states(self.graph, self.shardings, self.plan.axes, flows)
        return self

    def __str__(self) -> str:
        return self.graph.text(self.text)


def insert_collectives(sharded: Sharded) -> Lowered:
    """Convert every operand to the sharding that its op needs."""
    lowering = _Lowering(sharded)
    graph = sharded.graph
    factors = sharded.named.factors
    counter = RowCounter(sharded.named, sharded.plan, sharded.counts, lowering)
    for node, own, needs in zip(graph.nodes, factors, sharded.needs, strict=True):
        lowering.producer_where |= {v.name: node.location for v in node.results}
        if node.results[0].name in sharded.counts:
            counter.add(node)
            continue
        lowering.add(node, needs)
        if is_method(node):
            lowering.views[node.out.name] = node, own
    plan, shardings = sharded.plan, lowering.shardings
    loss, *others = graph.outputs
    outputs = (loss, *map(lowering.bring_out, others))
    new = prune(replace(graph, nodes=tuple(lowering.builder.nodes), outputs=outputs))
    origins = find_origins(new)
    new = fuse_collectives(new, lowering.shardings, [a for a, _ in plan.mesh.axes])
    return Lowered(
        sharded.named.traced,
        plan,
        new,
        lowering.dims,
        shardings,
        origins,
        sharded.ahead,
    ).verify()


class _Lowering(ReshardEmitter):
    def __init__(self, sharded: Sharded) -> None:
        super().__init__(sharded)
        self.graph, self.plan = sharded.graph, sharded.plan
        self.traced = sharded.named.traced
        self.sizes = sharded.plan.sizes
        self.views: dict[str, tuple[Node, tuple[Factor, ...]]] = {}
        self.ways = Ways(self.builder, self.dims, self.shardings)
        self.values = {v.name: v for n in sharded.graph.nodes for v in n.results}

    def add(self, node: Node, needs: tuple[Sharding, ...]) -> None:
        """Appends a node, after the collectives that its operands need."""
        converted = iter(
            [
                self.convert(v, need, node.location)
                for v, need in zip(node.operands, needs, strict=True)
            ]
        )
        self.builder.nodes.append(node.substitute(lambda _: next(converted)))

    def bring_out(self, v: Value) -> Value:
        """An output that is to be put together of what ranks have: a sum of their
        shares, or pieces of it, each row where its sample is."""
        have = self.shardings[v.name]
        sums = {axis: op for axis, op in have.pending if op == "sum"}
        need = have.with_pending(sums).with_route(None)
        return self.convert(v, need, self.producer_where[v.name])

    # --- conversion of one operand -------------------------------------------------

    def convert(self, v: Value, need: Sharding, where: Location) -> Value:
        """Move a value from the sharding it has to the one it must have."""
        have, rows = self.shardings[v.name], need.slots[:1]
        # Away from home rows are only summed: other moves count them.
        if have.route == need.route and (have.slots == need.slots or not have.route):
            return self.bring(v, need, where)
        if have.route is not None:
            way = self.ways.known(have.route, have.slots[:1])
            assert way is not None, f"%{v.name} came to its experts on some way"
            args = (have.route.axis, *way[1:])
            here = self.producer_where[v.name]
            v = self.emit(COMBINE, v, args, here, have.with_route(None))
        home = self.bring(v, need.with_route(None), where)
        if (route := need.route) is None:
            return home
        way = self.ways.known(route, rows)
        if way is None:
            experts = self.values[route.expert]
            lying = self.bring(experts, Sharding(rows), where)
            way = self.ways.make(route, lying, self.plan.size(route.axis), where)
        if v.name == route.expert:
            return way[0]
        out = self.shardings[home.name].with_route(route)
        return self.emit(DISPATCH, home, (route.axis, *way[1:]), where, out)

    def bring(self, v: Value, need: Sharding, where: Location) -> Value:
        """The same where rows stay with their experts, or at home."""
        if (early := self.hoist_reshard(v, need, where)) is not None:
            return early
        here = self.producer_where.get(v.name, where)
        v = self.resolve_pending(v, need, here)
        leaving = self.leaving(self.shardings[v.name], need)
        for axis in (a for a in reversed(self.order) if a in leaving):
            self.refuse_on_time(axis, v, where)
            v = self.reshard(v, axis, self.next_step(v, need, axis), where)
        for axis in self.order:
            if need.place(axis) and self.shardings[v.name].place(axis) is None:
                v = self.reshard(v, axis, self.next_step(v, need, axis), where)
        return self.enter(v, need, where)

    def next_step(self, v: Value, need: Sharding, axis: str) -> Step:
        """Returns the first step to what is needed on an axis. It splits where it must
        if all that splits the place outside of the axis does so already."""
        have, place = self.shardings[v.name], need.place(axis)
        direct = True
        if place is not None:
            d, i = place
            wanted = need.slots[d][i]
            direct = have.slots[d][i] == wanted[: wanted.index(axis)]
        return transition(have.state(axis), need.state(axis), direct)[0]

    def hoist_reshard(self, v: Value, need: Sharding, where: Location) -> Value | None:
        """Reshards a value before its views and copies, where it has fewer bytes."""
        if not self.sends(v, need):
            return None
        views: list[tuple[Node, Sharding]] = []
        x, lies, held = v, need, self.shardings[v.name]
        least, earlier = self.local_bytes(v, held), None
        while x.name in self.views:
            node, factors = self.views[x.name]
            views.append((node, lies))
            x = node.operands[0]
            sides = (before_view(factors, y, self.dims[x.name]) for y in (lies, held))
            before_lies, before_held = sides
            if before_lies is None or before_held is None:
                break
            lies, held = before_lies, before_held
            if (size := self.local_bytes(x, held)) < least:
                least, earlier = size, (x, lies, len(views))
        if earlier is None:
            return None
        x, lies, count = earlier
        x = self.convert(x, lies, where)
        for node, lies in reversed(views[:count]):
            shape, dims = node.out.shape, self.dims[node.out.name]
            x = self.emit(node.op, x, node.args[1:], node.location, lies, shape, dims)
        return x

    def sends(self, v: Value, need: Sharding) -> bool:
        """Whether a whole or split value has to be moved, forward or backward."""
        have = self.shardings[v.name]
        if have.pending or need.pending or have.route is not None:
            return False
        changes = have.slots != need.slots or bool(need.varying - have.varying)
        flows = v.name in self.differentiable
        return bool(self.leaving(have, need)) or (flows and changes)

    def local_bytes(self, v: Value, lies: Sharding) -> int:
        """Returns the bytes of a value on the first rank."""
        first = dict.fromkeys(self.sizes, 0)
        shape = lies.local_shape(self.dims[v.name], self.sizes, first)
        return prod(shape) * v.dtype.itemsize

    def leaving(self, have: Sharding, need: Sharding) -> set[str]:
        """The axes whose split must be undone. Those of one place nest, so what is
        split inside of an axis that comes or goes must go too."""
        leaving: set[str] = set()
        for d, slots in enumerate(have.slots):
            for i, axes in enumerate(slots):
                both = zip(axes, need.slots[d][i], strict=False)
                stay = list(takewhile(lambda pair: pair[0] == pair[1], both))
                leaving.update(axes[len(stay) :])
        return leaving

    def resolve_pending(self, v: Value, need: Sharding, where: Location) -> Value:
        """P -> S by reduce_scatter, P -> R by all_reduce, R -> P by division."""
        have = self.shardings[v.name]
        whole_axes: dict[str, list[str]] = {}
        for axis in self.order:
            op = have.pending_on(axis)
            if op is None or need.pending_on(axis):
                continue
            self.refuse_on_time(axis, v, where)
            step = self.next_step(v, need, axis)
            if step.to == R:
                whole_axes.setdefault(op, []).append(axis)
            else:
                v = self.reshard(v, axis, step, where)
                have = self.shardings[v.name]
        for op, axes in whole_axes.items():
            left = {a: o for a, o in have.pending if a not in axes}
            v = self.emit(
                "all_reduce", v, (tuple(axes), op), where, have.with_pending(left)
            )
            have = self.shardings[v.name]
        missing = [a for a, _ in need.pending if have.pending_on(a) is None]
        if missing:
            v = self.share_out(v, missing, where)
        return v

    def share_out(self, v: Value, axes: list[str], where: Location) -> Value:
        """R -> P: each of n ranks holds 1/n of the value."""
        parts = prod(map(self.plan.size, axes))
        have = self.shardings[v.name]
        pending = {**dict(have.pending), **dict.fromkeys(axes, "sum")}
        out = have.with_pending(pending).with_varying(have.varying - set(axes))
        # The cotangent of a share is whole, and each rank passes on 1/n of it.
        v = self.enter(v, have.with_varying(have.varying | set(axes)), where)
        return self.emit("aten.mul.Tensor", v, (1.0 / parts,), where, out)

    def enter(self, v: Value, need: Sharding, where: Location) -> Value:
        """R -> V, where a gradient will come back."""
        have = self.shardings[v.name]
        if v.name not in self.differentiable:
            return v
        both = ((a, have.state(a), need.state(a)) for a in self.order)
        axes = tuple(a for a, *ends in both if ends == [R, V])
        if not axes:
            return v
        for axis in axes:
            self.refuse_on_time(axis, v, where)
        out = have.with_varying(have.varying | set(axes))
        return self.emit("enter", v, (axes,), where, out)

    def refuse_on_time(self, axis: str, v: Value, where: Location) -> None:
        if axis == TIME:
            raise LossNotSeparable(
                f"%{v.name} {self.shardings[v.name].text(self.dims[v.name])} would "
                "have to be exchanged between microbatches",
                source=str(where),
                fix="use microbatches=1, or keep samples independent in the model",
                outputs=outputs_of([v], self.traced, self.graph),
            )
