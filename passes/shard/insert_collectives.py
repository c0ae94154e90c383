"""insert_collectives: make every move between shardings an op of the graph.

| from -> to | forward                    | backward             |
|---|---|---|
| P -> R     | all_reduce                 | nothing              |
| P -> S     | reduce_scatter             | all_gather           |
| S -> S'    | all_to_all                 | all_to_all           |
| S -> V     | all_gather                 | reduce_scatter       |
| S -> R     | all_gather                 | shard                |
| R -> S     | shard                      | all_gather           |
| V -> S     | shard                      | nothing (zeros around) |
| R -> V     | enter (nothing)            | all_reduce           |

A value that is moved for one consumer is shared by all that want it so: its cotangents
then add up locally before the one collective of the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from passes.capture.trace import Traced
from passes.dims.name_dims import Dim, Dims
from passes.dims.origins import Origin, find_differentiable, find_origins
from passes.errors import LossNotSeparable
from passes.graph import Builder, Graph, Node, Value, Where
from passes.mesh import TIME
from passes.plan import Plan
from passes.shard.propagate import Sharded
from passes.shard.sharding import Sharding


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
        """`f32[8,16,48] [batch/dp, seq/tp, embed]`, the shape being global."""
        return self.shardings[value.name].text(self.dims[value.name])

    def verify(self) -> Lowered:
        self.graph.verify()
        for v in self.graph.outputs:
            split = self.shardings[v.name].place(TIME)
            assert split is None, f"the output %{v.name} is split over microbatches"
        return self

    def __str__(self) -> str:
        lines = []
        for node in self.graph.nodes:
            outs = ", ".join(self.text(v) for v in node.results)
            lines.append(f"{outs:44} {node}")
        return "\n".join(lines)


def insert_collectives(sharded: Sharded) -> Lowered:
    """Convert every operand to the sharding that its op needs."""
    lowering = _Lowering(sharded)
    graph = sharded.graph
    for node, needs in zip(graph.nodes, sharded.needs, strict=True):
        lowering.add(node, needs)
    nodes = tuple(lowering.builder.nodes)
    new = replace(graph, nodes=nodes)
    return Lowered(
        sharded.named.traced,
        sharded.plan,
        new,
        lowering.dims,
        lowering.shardings,
        find_origins(new),
        sharded.ahead,
    ).verify()


class _Lowering:
    def __init__(self, sharded: Sharded) -> None:
        self.plan = sharded.plan
        self.order = list(sharded.plan.axes)
        traced = sharded.named.traced
        self.differentiable = set(find_differentiable(sharded.graph, traced.trainable))
        self.dims = dict(sharded.named.dims)
        self.shardings = dict(sharded.states)
        graph = sharded.graph
        self.builder = Builder.beside(graph.sources)
        self.builder.taken.update(v.name for n in graph.nodes for v in n.results)
        self.producer_where: dict[str, Where] = {}
        self.moved: dict[tuple[Any, ...], Value] = {}
        self.reshaped: dict[str, Value] = {}

    def add(self, node: Node, needs: tuple[Sharding, ...]) -> None:
        """Append a node, with what it needs inserted before it."""
        converted = iter(
            [
                self.convert(v, need, node.where)
                for v, need in zip(node.operands, needs, strict=True)
            ]
        )
        self.builder.nodes.append(node.substitute(lambda _: next(converted)))
        for v in node.results:
            self.producer_where[v.name] = node.where

    # --- conversion of one operand -------------------------------------------------

    def convert(self, v: Value, need: Sharding, where: Where) -> Value:
        """Move a value from the sharding it has to the one it must have."""
        here = self.producer_where.get(v.name, where)
        v = self.resolve_pending(v, need, here)
        have = self.shardings[v.name]
        leaving = self.leaving(have, need)
        for axis in reversed(self.order):
            place, wanted = have.place(axis), need.place(axis)
            if place is None or axis not in leaving:
                continue
            self.refuse_on_time(axis, v, where)
            if wanted and wanted != place and self.is_next(have, need, wanted, axis):
                v = self.move(v, axis, place, wanted, where)
            else:
                v = self.gather(v, axis, place, axis in need.varying, where)
            have = self.shardings[v.name]
        for axis in self.order:
            wanted = need.place(axis)
            if wanted is not None and self.shardings[v.name].place(axis) is None:
                v = self.shard(v, axis, wanted, where)
        return self.enter(v, need, where)

    def leaving(self, have: Sharding, need: Sharding) -> set[str]:
        """The axes whose split must be undone. Those of one place nest, so what is
        split inside of an axis that comes or goes must go too."""
        found: set[str] = set()
        for d, slots in enumerate(have.slots):
            for i, axes in enumerate(slots):
                both = zip(axes, need.slots[d][i], strict=False)
                stay = list(takewhile(lambda pair: pair[0] == pair[1], both))
                found.update(axes[len(stay) :])
        return found

    def is_next(
        self, have: Sharding, need: Sharding, place: tuple[int, int], axis: str
    ) -> bool:
        """Whether all that splits the place outside of the axis does so already."""
        d, i = place
        wanted = need.slots[d][i]
        return have.slots[d][i] == wanted[: wanted.index(axis)]

    def resolve_pending(self, v: Value, need: Sharding, where: Where) -> Value:
        """P -> S by reduce_scatter, P -> R by all_reduce, R -> P by division."""
        have = self.shardings[v.name]
        whole_axes: dict[str, list[str]] = {}
        for axis in self.order:
            op = have.pending_on(axis)
            if op is None or need.pending_on(axis):
                continue
            self.refuse_on_time(axis, v, where)
            wanted = need.place(axis)
            if op == "sum" and wanted and self.is_next(have, need, wanted, axis):
                v = self.scatter(v, axis, wanted, where)
                have = self.shardings[v.name]
            else:
                whole_axes.setdefault(op, []).append(axis)
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

    def share_out(self, v: Value, axes: list[str], where: Where) -> Value:
        """R -> P: each of n ranks holds 1/n of the value."""
        parts = 1
        for axis in axes:
            parts *= self.plan.size(axis)
        have = self.shardings[v.name]
        pending = {**dict(have.pending), **dict.fromkeys(axes, "sum")}
        out = have.with_pending(pending).with_varying(have.varying - set(axes))
        # The cotangent of a share is whole, and each rank passes on 1/n of it.
        v = self.enter(v, have.with_varying(have.varying | set(axes)), where)
        return self.emit("aten.mul.Tensor", v, (1.0 / parts,), where, out)

    def enter(self, v: Value, need: Sharding, where: Where) -> Value:
        """R -> V, where a gradient will come back."""
        have = self.shardings[v.name]
        if v.name not in self.differentiable:
            return v
        axes = tuple(a for a in self.order if a in need.varying - have.varying)
        axes = tuple(a for a in axes if have.place(a) is None)
        if not axes:
            return v
        for axis in axes:
            self.refuse_on_time(axis, v, where)
        out = have.with_varying(have.varying | set(axes))
        return self.emit("enter", v, (axes,), where, out)

    def refuse_on_time(self, axis: str, v: Value, where: Where) -> None:
        if axis == TIME:
            raise LossNotSeparable(
                f"%{v.name} {self.shardings[v.name].text(self.dims[v.name])} would "
                "have to be exchanged between microbatches",
                source=str(where),
                fix="use microbatches=1, or keep samples independent in the model",
            )

    # --- the moves -----------------------------------------------------------------

    def gather(
        self, v: Value, axis: str, place: tuple[int, int], varying: bool, where: Where
    ) -> Value:
        def collective(x: Value, dim: int) -> Value:
            out = self.shardings[x.name].without_split(axis)
            if varying:
                out = out.with_varying(out.varying | {axis})
            return self.emit("all_gather", x, (axis, dim), where, out)

        return self.on_own_dim(v, place, where, collective)

    def scatter(
        self, v: Value, axis: str, place: tuple[int, int], where: Where
    ) -> Value:
        def collective(x: Value, dim: int) -> Value:
            have = self.shardings[x.name]
            left = {a: o for a, o in have.pending if a != axis}
            split = have.with_pending(left)
            i = place[1] if len(have.slots[dim]) > 1 else 0
            out = split.with_split((dim, i), axis, self.order)
            return self.emit("reduce_scatter", x, (axis, dim), where, out)

        return self.on_own_dim(v, place, where, collective)

    def shard(self, v: Value, axis: str, place: tuple[int, int], where: Where) -> Value:
        def collective(x: Value, dim: int) -> Value:
            have = self.shardings[x.name]
            out = have.with_varying(have.varying - {axis})
            out = out.with_split((dim, 0), axis, self.order)
            pads = axis in have.varying
            return self.emit("shard", x, (axis, dim, pads), where, out)

        return self.on_own_dim(v, place, where, collective)

    def move(
        self,
        v: Value,
        axis: str,
        place: tuple[int, int],
        wanted: tuple[int, int],
        where: Where,
    ) -> Value:
        """S -> S': split another dim instead, each factor being a dim of its own."""
        dims, have = self.dims[v.name], self.shardings[v.name]
        apart_dims: list[tuple[Dim, ...]] = []
        apart_slots: list[tuple[tuple[str, ...], ...]] = []
        index: dict[tuple[int, int], int] = {}
        for d, (factors, slots) in enumerate(zip(dims, have.slots, strict=True)):
            index.update({(d, i): len(apart_dims) + i for i in range(len(factors))})
            apart_dims += [(x,) for x in factors] or [()]
            apart_slots += [(x,) for x in slots] or [()]
        lying = replace(have, slots=tuple(apart_slots))
        apart = self.reshape(v, tuple(apart_dims), lying, where)
        out = lying.without_split(axis)
        out = out.with_split((index[wanted], 0), axis, self.order)
        args = (axis, index[wanted], index[place])
        moved = self.emit("all_to_all", apart, args, where, out)
        done = have.without_split(axis).with_split(wanted, axis, self.order)
        return self.reshape(moved, dims, done, where)

    def on_own_dim(
        self, v: Value, place: tuple[int, int], where: Where, collective: Any
    ) -> Value:
        """Run a collective along one factor of a dim, seen as a dim of its own."""
        d, i = place
        dims, have = self.dims[v.name], self.shardings[v.name]
        if len(dims[d]) == 1:
            return collective(v, d)
        apart_dims = (*dims[:d], *((x,) for x in dims[d]), *dims[d + 1 :])
        apart_slots = (
            *have.slots[:d],
            *((s,) for s in have.slots[d]),
            *have.slots[d + 1 :],
        )
        apart = self.reshape(v, apart_dims, replace(have, slots=apart_slots), where)
        moved = collective(apart, d + i)
        done = self.shardings[moved.name]
        count = len(dims[d])
        joined = tuple(s[0] for s in done.slots[d : d + count])
        slots = (*done.slots[:d], joined, *done.slots[d + count :])
        return self.reshape(moved, dims, replace(done, slots=slots), where)

    def reshape(self, v: Value, dims: Dims, sharding: Sharding, where: Where) -> Value:
        shape = []
        for factors in dims:
            extent = 1
            for dim in factors:
                extent *= dim.size
            shape.append(extent)
        if dims == self.dims[v.name]:
            return v
        before = self.reshaped.get(v.name)
        if before is not None and self.dims[before.name] == dims:
            return before
        op = "aten.reshape.default"
        out = self.emit(op, v, (tuple(shape),), where, sharding, tuple(shape), dims)
        self.reshaped[out.name] = v
        return out

    def emit(
        self,
        op: str,
        x: Value,
        args: tuple[Any, ...],
        where: Where,
        sharding: Sharding,
        shape: tuple[int, ...] | None = None,
        dims: Dims | None = None,
    ) -> Value:
        """Append a move, or find the one that was made for another consumer."""
        key = (op, x.name, args, sharding)
        if key not in self.moved:
            full = op if "." in op else f"comm.{op}"
            out = self.builder.emit(full, (x, *args), shape or x.shape, x.dtype, where)
            self.dims[out.name] = dims or self.dims[x.name]
            self.shardings[out.name] = sharding
            if x.name in self.differentiable:
                self.differentiable.add(out.name)
            self.producer_where[out.name] = where
            self.moved[key] = out
        return self.moved[key]
