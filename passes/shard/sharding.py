"""Shardings: how a value lies on the mesh.

On each axis a value is in one of four states:

    S  split on one of its named dims        its gradient: S
    R  the same on all, used alike by all    its gradient: R
    V  the same on all, used differently     its gradient: a pending sum
    P  a pending sum or maximum              its gradient: R
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ..dims.name_dims import Dims, dim_text
from ..graph_text import name_text, read_name
from ..shard.resharding import MAX, P, R, State, V

Slots = tuple[tuple[tuple[str, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Route:
    """Rows that are where their experts are. axis: over which ranks they went there.
    expert: the value that names the expert of each row, of so many experts."""

    axis: str
    expert: str
    experts: int


class Sharding(NamedTuple):
    """slots: for each tensor dim, for each named dim in it, the axes that split it,
    outermost first. pending: (axis, "sum" | "max"). varying: axes in state V. route:
    if rows are not where their samples are, see `passes.shard.routed`."""

    slots: Slots
    pending: tuple[tuple[str, str], ...] = ()
    varying: frozenset[str] = frozenset()
    route: Route | None = None

    @classmethod
    def whole(cls, dims: Dims) -> Sharding:
        """The sharding of a replicated value."""
        return cls(tuple(tuple(() for _ in dim) for dim in dims))

    def place(self, axis: str) -> tuple[int, int] | None:
        """The (dim, factor) that the axis splits, if it splits any."""
        for d, factors in enumerate(self.slots):
            for i, axes in enumerate(factors):
                if axis in axes:
                    return d, i
        return None

    def pending_on(self, axis: str) -> str | None:
        """The reduction pending on an axis, or None."""
        return next((op for own, op in self.pending if own == axis), None)

    def state(self, axis: str) -> State:
        """Returns how the value is on one axis."""
        place, pending = self.place(axis), self.pending_on(axis)
        if place is not None or pending:
            return place or (P if pending == "sum" else MAX)
        return V if axis in self.varying else R

    def with_state(self, axis: str, state: State, order: list[str]) -> Sharding:
        """Returns the same with another state on an axis on which it is R."""
        if isinstance(state, tuple):
            return self.with_split(state, axis, order)
        if state in (P, MAX):
            pending = {**dict(self.pending), axis: "sum" if state == P else "max"}
            return self.with_pending(pending)
        return self.with_varying(self.varying | {axis}) if state == V else self

    def with_split(
        self, place: tuple[int, int], axis: str, order: list[str]
    ) -> Sharding:
        """Split a place further; axes nest in the given order."""

        def change(axes: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(sorted((*axes, axis), key=order.index))

        return self._with_slots(place, change)

    def without_split(self, axis: str) -> Sharding:
        """The sharding with dims whole on an axis."""
        place = self.place(axis)
        if place is None:
            return self
        return self._with_slots(place, lambda axes: tuple(a for a in axes if a != axis))

    def _with_slots(
        self,
        place: tuple[int, int],
        change: Callable[[tuple[str, ...]], tuple[str, ...]],
    ) -> Sharding:
        d, i = place
        dim = self.slots[d]
        dim = (*dim[:i], change(dim[i]), *dim[i + 1 :])
        slots = (*self.slots[:d], dim, *self.slots[d + 1 :])
        return Sharding(slots, self.pending, self.varying, self.route)

    def with_pending(self, pending: Mapping[str, str]) -> Sharding:
        return Sharding(self.slots, tuple(pending.items()), self.varying, self.route)

    def with_varying(self, axes: frozenset[str] | set[str]) -> Sharding:
        return Sharding(self.slots, self.pending, frozenset(axes), self.route)

    def with_route(self, route: Route | None) -> Sharding:
        return Sharding(self.slots, self.pending, self.varying, route)

    def local_factors(
        self, dims: Dims, sizes: Mapping[str, int], coords: Mapping[str, int]
    ) -> tuple[tuple[int, ...], ...]:
        """The extent of each factor of each dim on the rank at `coords`."""
        return tuple(
            tuple(
                local_extent(dim.size, axes, sizes, coords) if axes else dim.size
                for dim, axes in zip(factors, slots, strict=True)
            )
            for factors, slots in zip(dims, self.slots, strict=True)
        )

    def local_shape(
        self, dims: Dims, sizes: Mapping[str, int], coords: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Shape of the shard at `coords`."""
        return tuple(map(prod, self.local_factors(dims, sizes, coords)))

    def text(self, dims: Dims) -> str:
        """`[batch/dp, (seq/tp heads), embed] +tp`; `[tokens/ep, embed] by expert`."""
        parts = zip(dims, self.slots, strict=True)
        texts = (dim_text([d.name for d in own], slots) for own, slots in parts)
        text = f"[{', '.join(texts)}]"
        for axis, op in self.pending:
            text += f" +{axis}" if op == "sum" else f" {op}:{axis}"
        return f"{text} by expert" if self.route else text

    def exact_text(self, dims: Dims) -> str:
        """The `text` with all that `parse` reads: `[embed] ~dp`, which varies on dp;
        `[tokens/ep] by %expert of 8 on ep`."""
        text = self.text(dims)
        if (route := self.route) is not None:
            whose = f"{name_text(route.expert)} of {route.experts} on {route.axis}"
            text = f"{text.removesuffix('expert')}{whose}"
        return text + "".join(f" ~{axis}" for axis in sorted(self.varying))

    @classmethod
    def parse(cls, text: str) -> Sharding:
        """Reads what `exact_text` prints."""
        inner, _, more = text[1:].partition("]")
        dims = re.findall(r"\([^)]*\)|[^,\s]+", inner)
        slots = tuple(
            tuple(tuple(dim.split("/")[1:]) for dim in factors.strip("()").split())
            if factors != "1"
            else ()
            for factors in dims
        )
        route = re.search(r"by (%\S+) of (\d+) on (\w+)", more)
        pending = re.findall(r" (\+|max:)(\w+)", more)
        return cls(
            slots,
            tuple((axis, "sum" if op == "+" else "max") for op, axis in pending),
            frozenset(re.findall(r" ~(\w+)", more)),
            route and Route(route[3], read_name(route[1]), int(route[2])),
        )


def local_extent(
    extent: int,
    axes: tuple[str, ...],
    sizes: Mapping[str, int],
    coords: Mapping[str, int],
) -> int:
    """A dim's extent on a rank: split by each axis in turn, as even as can be."""
    for axis in axes:
        least, more = divmod(extent, sizes[axis])
        extent = least + (coords[axis] < more)  # as `balanced` has it
    return extent
