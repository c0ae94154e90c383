"""count_rows: sums over the batch that each rank adds up of its own rows alone.

What a loss is divided by, the count of labels that are not ignored, is summed over all
microbatches before the first. Ranks that the batch is split over need not read each
other's labels for that: each counts its own, and one number is summed over all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ..dims.name_dims import Dim, Named
from ..dims.origins import Origin
from ..graph import Location, Node, Value
from ..mesh import TIME
from ..ops.random import CHANCE
from ..plan import Plan
from ..shard.sharding import Sharding

if TYPE_CHECKING:
    from ..shard.emit_resharding import ReshardEmitter


def find_counts(named: Named, plan: Plan) -> dict[str, Dim]:
    """Sums over the batch that are computed from one field by rows: name -> their dim.

    Of several fields, rows of one might be read as another rank's. Where ranks' shares
    differ in size, they do in another way by microbatches than of the whole batch.
    """
    parts = prod(plan.size(a) for a in plan.data_axes)
    if parts == 1:
        return {}
    # Value that has a row for each sample -> the field it is made of, and their dim.
    rows: dict[str, tuple[str, Dim]] = {}
    for v in named.graph.inputs:
        batch = [d for d in (named.dims[v.name] or ((),))[0] if d.name == "batch"]
        if batch and len(named.dims[v.name][0]) == 1 and batch[0].size % parts == 0:
            rows[v.name] = v.name, batch[0]
    counts = {}
    for node, factors in zip(named.graph.nodes, named.factors, strict=True):
        made_of = {rows[v.name] for v in node.operands if v.name in rows}
        others = [v for v in node.operands if v.name not in rows]
        if len(made_of) != 1 or node.op in CHANCE:
            continue
        ((field, dim),) = made_of
        own = [f for f in factors if f.dim == dim]
        whole = all(named.origins[v.name] is Origin.CONSTANT for v in others)
        if not whole or any(dim in d for v in others for d in named.dims[v.name]):
            continue
        if [f.role for f in own] == ["map"]:
            rows.update((v.name, (field, dim)) for v in node.results)
        elif [f.role for f in own] == ["sum"] and len(node.outs) == 1:
            counts[node.out.name] = dim
    return counts


class RowCounter:
    """Appends what counts in `find_counts`, beside what the loop makes of the same."""

    def __init__(
        self, named: Named, plan: Plan, counts: Mapping[str, Dim], to: ReshardEmitter
    ) -> None:
        self.named, self.counts, self.to = named, counts, to
        self.axes = tuple(a for a in plan.data_axes if a != TIME)
        self.producers = named.graph.producers()
        self.own: dict[str, Value] = {}  # of this rank's rows of all microbatches

    def add(self, node: Node) -> None:
        """A sum of the rows of this rank, and then of all ranks, if others have any."""
        mine = self._copy(node, self.counts[node.out.name])
        if not self.axes:
            return
        args = (mine, self.axes, "sum")
        all_reduce = Node("comm.all_reduce", args, {}, node.outs, node.location)
        self.to.builder.nodes.append(all_reduce)

    def _rows(self, v: Value, dim: Dim, where: Location) -> Value:
        if not any(dim in own for own in self.named.dims[v.name]):
            return v
        if v.name not in self.own:
            if (node := self.producers.get(v.name)) is not None:
                self._copy(node, dim)
            else:
                self.own[v.name] = v
                for axis in self.axes:
                    before = self.own[v.name]
                    self.own[v.name] = self.to.shard(before, axis, (0, 0), where)
        return self.own[v.name]

    def _copy(self, node: Node, dim: Dim) -> Value:
        """A node for the rows of this rank; returns its first result."""
        copy = node.substitute(lambda v: self._rows(v, dim, node.location))
        for v in node.results:
            dims = self.named.dims[v.name]
            over = (tuple(self.axes if d == dim else () for d in own) for own in dims)
            lies = Sharding(tuple(over))
            if v.name in self.counts:
                lies = lies.with_pending(dict.fromkeys(self.axes, "sum"))
            alone = v.name in self.counts and not self.axes
            own = v if alone else replace(v, name=self.to.builder.name(v.name))
            self.to.dims[own.name], self.to.shardings[own.name] = dims, lies
            self.own[v.name] = own
        outs = tuple(v and self.own[v.name] for v in node.outs)
        self.to.builder.nodes.append(replace(copy, outs=outs))
        return self.own[node.results[0].name]
