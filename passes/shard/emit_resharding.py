"""The nodes of steps from one sharding to another: see `passes.shard.resharding`.

A factor of a dim is moved as a dim of its own, with views around the collective.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ..builder import Builder
from ..dims.name_dims import Dim, Dims
from ..dims.origins import find_differentiable
from ..graph import Location, Value
from ..mesh import CONTEXT_AXES
from ..ops.collectives import MEAN
from ..shard.parameter_sharding import find_casts
from ..shard.propagate import Sharded
from ..shard.resharding import Step, V
from ..shard.sharding import Sharding


class ReshardEmitter:
    """Appends steps to a graph that is built, each once for all that want it."""

    def __init__(self, sharded: Sharded) -> None:
        self.order = list(sharded.plan.axes)
        traced = sharded.named.traced
        self.differentiable = set(find_differentiable(sharded.graph, traced.trainable))
        self.dims = dict(sharded.named.dims)
        self.shardings = dict(sharded.states)
        graph = sharded.graph
        params = {v.name for v in graph.params}
        self.at_rest = params | find_casts(graph.nodes, graph.params).keys()
        self.builder = Builder.beside(graph.sources)
        self.builder.taken.update(v.name for n in graph.nodes for v in n.results)
        self.producer_where: dict[str, Location] = {}
        self.moved: dict[tuple[Any, ...], Value] = {}
        self.reshaped: dict[str, Value] = {}

    def reshard(self, v: Value, axis: str, step: Step, where: Location) -> Value:
        """Take a step that ends in a split or begins at one."""
        place, to = self.shardings[v.name].place(axis), step.to
        if isinstance(to, tuple):
            if place is not None:
                return self.move(v, axis, place, to, where)
            take = self.scatter if step.op == "reduce_scatter" else self.shard
            return take(v, axis, to, where)
        assert place is not None, f"{step} of what is not split on '{axis}'"
        return self.gather(v, axis, place, to == V, where)

    def gather(
        self,
        v: Value,
        axis: str,
        place: tuple[int, int],
        varying: bool,
        where: Location,
    ) -> Value:
        """All-gathers v over an axis, which split a place of it (a dim, a slot there).
        varying: whether ranks go on to do different things with it."""
        # To slice its gradient would be to take rows, which may lie in zigzag there.
        in_one_piece = axis in CONTEXT_AXES and v.name in self.at_rest

        def collective(x: Value, dim: int) -> Value:
            out = self.shardings[x.name].without_split(axis)
            if varying:
                out = out.with_varying(out.varying | {axis})
            back = (None, MEAN) if in_one_piece and not varying else ()
            return self.emit("all_gather", x, (axis, dim, *back), where, out)

        whole = self.on_own_dim(v, place, where, collective)
        if v.name in self.at_rest:  # other axes may split what is whole on this one
            self.at_rest.add(whole.name)
        return whole

    def scatter(
        self, v: Value, axis: str, place: tuple[int, int], where: Location
    ) -> Value:
        """Reduce-scatters v, a pending sum over an axis, which then splits a place."""

        def collective(x: Value, dim: int) -> Value:
            have = self.shardings[x.name]
            left = {a: o for a, o in have.pending if a != axis}
            split = have.with_pending(left)
            i = place[1] if len(have.slots[dim]) > 1 else 0
            out = split.with_split((dim, i), axis, self.order)
            return self.emit("reduce_scatter", x, (axis, dim), where, out)

        return self.on_own_dim(v, place, where, collective)

    def shard(
        self, v: Value, axis: str, place: tuple[int, int], where: Location
    ) -> Value:
        """Slices v, which ranks of an axis have whole and then split a place of."""

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
        where: Location,
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
        lying = have._replace(slots=tuple(apart_slots))
        apart = self.reshape(v, tuple(apart_dims), lying, where)
        out = lying.without_split(axis)
        out = out.with_split((index[wanted], 0), axis, self.order)
        args = (axis, index[wanted], index[place])
        moved = self.emit("all_to_all", apart, args, where, out)
        done = have.without_split(axis).with_split(wanted, axis, self.order)
        return self.reshape(moved, dims, done, where)

    def on_own_dim(
        self, v: Value, place: tuple[int, int], where: Location, collective: Any
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
        apart = self.reshape(v, apart_dims, have._replace(slots=apart_slots), where)
        moved = collective(apart, d + i)
        done = self.shardings[moved.name]
        count = len(dims[d])
        joined = tuple(s[0] for s in done.slots[d : d + count])
        slots = (*done.slots[:d], joined, *done.slots[d + count :])
        return self.reshape(moved, dims, done._replace(slots=slots), where)

    def reshape(
        self, v: Value, dims: Dims, sharding: Sharding, where: Location
    ) -> Value:
        """v seen with other named dims, of the same elements in the same order."""
        if dims == self.dims[v.name]:
            return v
        before = self.reshaped.get(v.name)
        if before is not None and self.dims[before.name] == dims:
            return before
        shape = tuple(prod(dim.size for dim in factors) for factors in dims)
        op = "aten.reshape.default"
        out = self.emit(op, v, (shape,), where, sharding, shape, dims)
        self.reshaped[out.name] = v
        return out

    def emit(
        self,
        op: str,
        x: Value,
        args: tuple[Any, ...],
        where: Location,
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
