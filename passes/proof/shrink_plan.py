"""shrink_plan: the same decisions, for fewer ranks, microbatches and layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

from passes.graph import LAYER
from passes.mesh import TIME, Mesh
from passes.plan import Plan
from passes.proof.choose_sizes import Divides, Split
from passes.proof.extents import MARGIN
from passes.shard.propagate import Sharded

T = TypeVar("T")

# Ranks of a larger axis. Neighbours on a ring, and stages inside of a pipeline, are
# more than the ends: there it takes three.
FEW, CHAIN = 2, 3


@dataclass(frozen=True)
class Layers:
    """Layers of a stage, and those of its small one. path: of their list, "" if none
    is left out. kept: of each small one the number in the large one, each from its
    stage's first. count: how many the large one has."""

    path: str
    kept: tuple[int, ...]
    count: int

    def stands_for(self, small: int, large: int) -> bool:
        """Whether numbers are those of one layer, counted from the first or from the
        last of a pattern; or where these end."""
        few = len(self.kept)
        apart = [*(n - i for i, n in enumerate(self.kept)), self.count - few]
        at = max(0, min(small, few))
        own = apart[at] if small >= 0 else 0
        after = next((i for i in range(at, few + 1) if apart[i] != own), None)
        if after is None or small <= apart.index(own):
            return large - small == own
        return large - small == apart[after] or (
            large == small + own and at < after - 1
        )


@dataclass(frozen=True)
class FewLayers:
    """Which layers of a repeating list are kept. path: of the list, "" if all are kept.
    stages: for each stage of the small pipeline, the stage of the large one that it
    stands for. kept: for each of them the numbers of its layers in the large model."""

    path: str
    stages: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The large number of each small layer."""
        return tuple(n for own in self.kept for n in own)

    def layers(self, place: int, count: int) -> Layers:
        """Those of a small stage, which stands for one that has so many."""
        own = self.kept[place] if self.path else ()
        return Layers(self.path, tuple(n - own[0] for n in own), count)

    @property
    def starts(self) -> tuple[str, ...]:
        """The layers that begin the stages but the first, by their small names."""
        count, found = 0, []
        for own in self.kept[:-1]:
            count += len(own)
            found.append(f"{self.path}.{count}")
        return tuple(found)

    def small_name(self, text: str) -> str | None:
        """A pattern of layers with small numbers; None if it is of dropped ones."""
        if not self.path:
            return text
        match = re.match(rf"{re.escape(self.path)}\.(\d+)(?=[.:]|$)", text)
        if match is None:
            return text
        number = int(match[1])
        if number not in self.order:
            return None
        return f"{self.path}.{self.order.index(number)}{text[match.end() :]}"


def small_mesh(plan: Plan, sizes: Mapping[str, int]) -> Mesh:
    return Mesh(tuple((axis, sizes[axis]) for axis, _ in plan.mesh.axes))


def small_sizes(
    plan: Plan, few: FewLayers | None, splits: Mapping[int, frozenset[Split]]
) -> dict[str, int]:
    """Axis -> its ranks in the small plan; of time its microbatches.

    splits: size -> the axes that split an extent of it. An extent that gives less than
    one to each rank still does; one that is too small to be made smaller divides as it
    did.
    """
    sizes = {axis: _few(plan, axis) for axis, _ in plan.mesh.axes}
    if few is not None and few.path:
        sizes["pp"] = len(few.stages) // plan.stages_per_rank
    elif "pp" in sizes:
        sizes["pp"] = plan.mesh.axis_size("pp")
    sizes[TIME] = _microbatches(plan, sizes.get("pp", 1))
    for extent, found in sorted(splits.items()):
        for axes in found:
            _fit(plan, sizes, extent, axes)
    return sizes


def _few(plan: Plan, axis: str) -> int:
    size = plan.mesh.axis_size(axis)
    is_ring = any(dim.startswith("ring:") for dim in plan.split.get(axis, ()))
    return size if size <= CHAIN else CHAIN if axis == "pp" or is_ring else FEW


def _fit(plan: Plan, sizes: dict[str, int], extent: int, axes: Split) -> None:
    """Enlarge the innermost axis until a small extent can divide as it does."""
    large = prod(plan.size(a) for a in axes)
    inner = axes[-1]

    def divides(n: int) -> bool:
        return Divides.of(n, prod(sizes[a] for a in axes)) == Divides.of(extent, large)

    own = [extent] if extent <= MARGIN else range(2, 8 * large)
    first = sizes[inner]
    for ranks in range(first, plan.size(inner) + 1):
        sizes[inner] = ranks
        if any(map(divides, own)):
            return
    sizes[inner] = first


def _microbatches(plan: Plan, pp: int) -> int:
    """Enough to fill a pipeline and to be in its steady state."""
    m = plan.microbatches
    if m == 1:
        return 1
    if pp == 1:
        return m if m <= CHAIN else FEW
    large = plan.mesh.axis_size("pp")
    if plan.stages_per_rank > 1:
        return min(m, pp if m < 2 * large else 2 * pp)
    return min(m, pp if m <= large else pp + 1)


def find_splits(sharded: Sharded) -> dict[int, frozenset[Split]]:
    """Extent of a named dim -> the axes that split it in some value, or that could have
    done so: how it divides decides whether they do."""
    named, plan = sharded.named, sharded.plan
    found: dict[int, set[Split]] = {}
    lies = [(n.name, sharded.states[n.name]) for n in named.graph.sources]
    for node, needs in zip(named.graph.nodes, sharded.needs, strict=True):
        lies += [(v.name, sharded.states[v.name]) for v in node.results]
        lies += [(v.name, s) for v, s in zip(node.operands, needs, strict=True)]
    held = {v.name for v in named.graph.params}
    wanted = {
        axis: {dim.rpartition(":")[2] for dim in plan.split.get(axis, ())}
        for axis in plan.axes
    }
    for name, sharding in lies:
        for dim, slots in zip(named.dims[name], sharding.slots, strict=True):
            for d, axes in zip(dim, slots, strict=True):
                own = found.setdefault(d.size, set())
                own.add(axes)
                own |= {(axis,) for axis in plan.axes if d.name in wanted[axis]}
                if name in held:  # see `passes.shard.rest.rest_split`
                    rest = [a for a in plan.rest_axes if a not in axes]
                    own |= {(*axes, axis) for axis in rest}
    return {n: frozenset(s for s in splits if s) for n, splits in found.items()}


def shrink_plan(plan: Plan, few: FewLayers, sizes: Mapping[str, int]) -> Plan:
    """The plan of the small model.

    plan: complete, as compiling leaves it. sizes: of `small_sizes`.
    """

    def renamed(table: Mapping[str, T]) -> dict[str, T]:
        named = ((few.small_name(k), v) for k, v in table.items())
        return {k: v for k, v in named if k is not None}

    return replace(
        plan,
        mesh=small_mesh(plan, sizes),
        microbatches=sizes[TIME],
        order=(),
        memory=0,
        cuts=few.starts if few.path else plan.cuts,
        hints=renamed(plan.hints),
        labels={axis: renamed(table) for axis, table in plan.labels.items()},
        recompute_layers=renamed(plan.recompute_layers),
    )


def thin(kinds: Sequence[object], keep: int) -> list[int]:
    """Which of some layers are enough: of a pattern that repeats, `keep` repeats.

    kinds: of each layer, equal for layers that are alike.
    """
    kept = list(range(len(kinds)))
    for length in range(1, max(1, len(kinds) // (keep + 1)) + 1):
        i = 0
        while i + length * (keep + 1) <= len(kept):
            window = [kinds[n] for n in kept[i : i + length * (keep + 1)]]
            if all(window[j] == window[j % length] for j in range(len(window))):
                del kept[i + length * keep : i + length * (keep + 1)]
            else:
                i += 1
    return kept


def choose_layers(
    path: str,
    kinds: Sequence[object],
    by_stage: Sequence[Sequence[int]],
    plan: Plan,
    keep: int,
) -> FewLayers:
    """Which layers and which stages stand for all.

    kinds: of each layer of the list. by_stage: the layers of each stage. Kept whole
    where a stage has no layer of the list, or shares one with another.
    """
    ranks = plan.mesh.axis_size("pp")
    every = FewLayers("", tuple(range(len(by_stage))), ())
    flat = [n for own in by_stage for n in own]
    if flat != list(range(len(kinds))) or not all(by_stage):
        return every
    found = [thin([kinds[n] for n in own], keep) for own in by_stage]
    kept = [
        tuple(own[i] for i in few) for own, few in zip(by_stage, found, strict=True)
    ]
    chosen = list(range(len(by_stage)))
    if ranks > CHAIN:
        # The stages inside that have most kinds of layers stand for the others.
        count = CHAIN * plan.stages_per_rank
        inside = sorted(chosen[1:-1], key=lambda s: -len(kept[s]))[: count - 2]
        chosen = [chosen[0], *sorted(inside), chosen[-1]]
    return FewLayers(path, tuple(chosen), tuple(kept[s] for s in chosen))


def layer_number(path: str, module: str) -> int | None:
    """3 of `blocks.3.attention`, in the list `blocks`."""
    match = LAYER.search(module)
    if match is None or module[: match.start()] != f"{path}.":
        return None
    return int(match[1])
