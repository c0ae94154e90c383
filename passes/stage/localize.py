"""localize: from global shapes to one rank's own.

Only what carries a size changes: shapes in views, the pieces of a split, and the ops
that must know where in the global tensor their shard begins. Extents that do not divide
are split as even as can be, so ranks may differ by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ..dims.name_dims import Dims
from ..graph import Node, Value
from ..mesh import Axes, Split, as_axes
from ..ops.op import op_of
from ..shard.sharding import Sharding


@dataclass(frozen=True)
class Localizer:
    """Gives values and nodes the shapes they have on the rank at `coords`."""

    dims: Mapping[str, Dims]
    shardings: Mapping[str, Sharding]
    sizes: Mapping[str, int]
    coords: Mapping[str, int]

    def value(self, v: Value) -> Value:
        """The value in the shape that it has on a rank."""
        if v.name not in self._values:
            sharding, dims = self.shardings[v.name], self.dims[v.name]
            key = id(sharding), id(dims)  # layers that are alike share both
            if key not in self._shapes:
                own = sharding.local_shape(dims, self.sizes, self.coords)
                self._shapes[key] = own
            self._values[v.name] = Value(v.name, self._shapes[key], v.dtype)
        return self._values[v.name]

    @cached_property
    def _values(self) -> dict[str, Value]:
        return {}

    @cached_property
    def _shapes(self) -> dict[tuple[int, int], tuple[int, ...]]:
        return {}

    def node(self, node: Node) -> Node:
        """The node with one rank's shapes and arguments."""
        local = node.substitute(self.value)
        outs = tuple([None if v is None else self.value(v) for v in node.outs])
        local = Node(local.op, local.args, local.kwargs, outs, local.location)
        op = op_of(node)
        if op.sizes is not None:
            local = op.sizes(local)
        return op.on_rank(self, node, local) if op.on_rank else local

    def axes_of(self, v: Value, dim: int) -> tuple[str, ...]:
        """The axes that split a dim of one factor."""
        slots = self.shardings[v.name].slots[dim]
        if not any(slots):
            return ()
        assert len(slots) == 1, f"%{v.name}: a dim that is looked up must be one factor"
        return slots[0]

    def is_varying(self, v: Value, axes: Axes) -> bool:
        """Whether ranks along the axes each do something else with the value."""
        return set(as_axes(axes)) <= self.shardings[v.name].varying

    def position(self, v: Value, dim: int) -> tuple[Split, ...]:
        """The factors of a dim, each its global extent and the axes that split it."""
        factors, slots = self.dims[v.name][dim], self.shardings[v.name].slots[dim]
        return tuple((d.size, axes) for d, axes in zip(factors, slots, strict=True))
