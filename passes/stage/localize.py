"""localize: from global shapes to one rank's own.

Only what carries a size changes: shapes in views, the pieces of a split, and the ops
that must know where in the global tensor their shard begins. Extents that do not divide
are split as even as can be, so ranks may differ by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

from passes.dims.name_dims import Dims
from passes.graph import Node, Value
from passes.mesh import Axes, as_axes
from passes.shard.ring import ATTENTION
from passes.shard.sharding import Sharding, local_extent


@dataclass(frozen=True)
class Localizer:
    """Gives values and nodes the shapes they have on the rank at `coords`."""

    dims: Mapping[str, Dims]
    shardings: Mapping[str, Sharding]
    sizes: Mapping[str, int]
    coords: Mapping[str, int]

    def value(self, v: Value) -> Value:
        return Value(v.name, self._shape(v.name), v.dtype)

    @cached_property
    def _shape(self) -> Callable[[str], tuple[int, ...]]:
        def shape(name: str) -> tuple[int, ...]:
            sharding = self.shardings[name]
            return sharding.local_shape(self.dims[name], self.sizes, self.coords)

        return cache(shape)

    def node(self, node: Node) -> Node:
        local = node.substitute(self.value)
        outs = tuple([None if v is None else self.value(v) for v in node.outs])
        local = Node(local.op, local.args, local.kwargs, outs, local.where)
        change = CHANGES.get(node.op) or CHANGES.get(node.name)
        return change(self, node, local) if change else local

    def position(self, v: Value, dim: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """The factors of a dim, each its global extent and the axes that split it."""
        factors, slots = self.dims[v.name][dim], self.shardings[v.name].slots[dim]
        return tuple((d.size, axes) for d, axes in zip(factors, slots, strict=True))

    def extents_along(self, v: Value, dim: int, over: Axes) -> tuple[int, ...] | None:
        """The extents of a split dim on the ranks of some axes; None if equal."""
        (of,), (axes,) = self.dims[v.name][dim], self.shardings[v.name].slots[dim]
        over = as_axes(over)
        places = product(*(range(self.sizes[axis]) for axis in over))
        coords = (dict(zip(over, place, strict=True)) for place in places)
        found = tuple(
            local_extent(of.size, axes, self.sizes, {**self.coords, **one})
            for one in coords
        )
        return None if len(set(found)) == 1 else found


def _out_shape(_: Localizer, node: Node, local: Node) -> Node:
    """reshape, expand: the target shape is the local one."""
    return replace(local, args=(local.args[0], local.out.shape))


def _split(_: Localizer, node: Node, local: Node) -> Node:
    extents = tuple(v.shape[node.arg("dim")] for v in local.results)
    if node.op == "aten.split.Tensor":
        return local.with_args(split_size=extents[0])
    return local.with_args(split_sizes=extents)


def _conv1d(_: Localizer, node: Node, local: Node) -> Node:
    """Gives a rank as many groups as it has channels, if each has its own filter."""
    alone = node.arg("groups") == node.out.shape[1] > 1
    return local.with_args(groups=local.out.shape[1]) if alone else local


def _lookup(at: Localizer, node: Node, local: Node) -> Node:
    """An embedding whose rows are split is looked up by global index."""
    table = node.operands[0]
    rows, axes = table.shape[0], _axes_of(at, table, 0)
    if not axes:
        return local
    padding = node.arg("padding_idx")
    padding = padding if padding >= 0 else None
    args = (*local.operands, rows, axes, padding)
    return replace(local, op="comm.lookup", args=args)


def _pick(at: Localizer, node: Node, local: Node) -> Node:
    x, _, *ignored = node.args
    axes = _axes_of(at, x, len(x.shape) - 1)
    args = (*local.operands, *(ignored or (None,)), x.shape[-1], axes)
    return replace(local, op="comm.pick", args=args)


def _expert_linear(at: Localizer, node: Node, local: Node) -> Node:
    """Rows look their expert up by its global number."""
    weight = node.operands[2]
    axes = _axes_of(at, weight, 0)
    args = (*local.args, weight.shape[0], axes)
    return replace(local, op="comm.expert_linear", args=args)


def _axes_of(at: Localizer, v: Value, dim: int) -> tuple[str, ...]:
    slots = at.shardings[v.name].slots[dim]
    if not any(slots):
        return ()
    assert len(slots) == 1, f"%{v.name}: a dim that is looked up must be a single one"
    return slots[0]


def _dropout(at: Localizer, node: Node, local: Node) -> Node:
    """The mask is a function of the global position of each element."""
    x = node.operands[0]
    position = tuple(at.position(x, dim) for dim in range(len(x.shape)))
    return replace(local, op="comm.dropout", args=(*local.args, position))


def _choose(at: Localizer, node: Node, local: Node) -> Node:
    """What is chosen may be told, by global position."""
    x = node.operands[0]
    position = tuple(at.position(x, dim) for dim in range(len(x.shape) - 1))
    return replace(local, op="comm.choose", args=(*local.args, position))


def _attention(at: Localizer, node: Node, local: Node) -> Node:
    """Attention of some of the rows, under a causal mask, goes by their positions; so
    does attention to a window of the keys, or to some of them, which are passed round:
    see `passes.shard.ring`."""
    q, k, is_causal = node.args[0], node.args[1], node.args[4]
    rows, keys = at.position(q, 2), at.position(k, 2)
    axes = [axis for _, split in keys for axis in split]
    apart = is_causal and any(split for _, split in rows)
    if not axes and not apart and "window" not in node.kwargs:
        return local
    assert len(axes) < 2, f"{node}: keys are passed round on one axis, not on {axes}"
    ring, ranks = (axes[0], at.sizes[axes[0]]) if axes else (None, 1)
    return replace(local, op=ATTENTION, args=(*local.args, rows, keys, ring, ranks))


def _gather(at: Localizer, node: Node, local: Node) -> Node:
    x, axes, dim = node.args
    sizes = at.extents_along(x, dim, axes)
    varying = set(as_axes(axes)) <= at.shardings[node.out.name].varying
    return replace(local, args=(*local.args, sizes, varying))


def _all_to_all(at: Localizer, node: Node, local: Node) -> Node:
    x, axis, _, concat_dim = node.args
    return replace(local, args=(*local.args, at.extents_along(x, concat_dim, axis)))


CHANGES: dict[str, Any] = {
    "aten.reshape": _out_shape,
    "aten.expand": _out_shape,
    "aten.split": _split,
    "aten.split_with_sizes": _split,
    "aten.conv1d": _conv1d,
    "aten.embedding": _lookup,
    "autopar.pick": _pick,
    "autopar.expert_linear": _expert_linear,
    "autopar.attention": _attention,
    "autopar.dropout": _dropout,
    "autopar.choose": _choose,
    "comm.all_gather": _gather,
    "comm.all_to_all": _all_to_all,
}
