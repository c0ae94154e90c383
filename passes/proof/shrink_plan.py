"""shrink_plan: the same decisions, for fewer ranks, microbatches and layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate
from math import inf, prod
from typing import TypeVar

from ..dims.name_dims import Dim
from ..mesh import PIPELINE, TIME, Mesh
from ..plan import Plan
from ..proof.choose_sizes import Candidates
from ..proof.extents import Bound, Extent, Extents, Split
from ..shard.propagate import Sharded
from ..shard.ring import has_rings

T = TypeVar("T")

# Ranks of a larger axis. Neighbours on a ring, and stages inside of a pipeline, are
# more than the ends: there it takes three.
FEW, CHAIN = 2, 3
TRIES = 1000  # small meshes that are looked at
AS_FIXED = 4  # how many more ranks sizes that stay may take


@dataclass(frozen=True)
class StageLayers:
    """Layers of a stage, and those of its small one. path: of their list, "" if none is
    left out. numbers: of each small one that in the large one, each from its stage's
    first. count: how many the large one has. begins: the first's number in the whole
    list, of the small one and of the large one."""

    path: str
    numbers: tuple[int, ...]
    count: int
    begins: tuple[int, int] = (0, 0)

    def are_rows(self, small: int, large: int) -> bool:
        """Whether a table with a row for each layer of the model has theirs there."""
        first, its = self.begins
        return bool(self.path) and self.stands_for(small - first, large - its)

    def stands_for(self, small: int, large: int) -> bool:
        """Whether numbers are those of one layer, counted from the first or from the
        last of a pattern; or where these end."""
        few = len(self.numbers)
        apart = [*(n - i for i, n in enumerate(self.numbers)), self.count - few]
        at = max(0, min(small, few))
        own = apart[at] if small >= 0 else 0
        after = next((i for i in range(at, few + 1) if apart[i] != own), None)
        if after is None or small <= apart.index(own):
            return large - small == own
        return large - small == apart[after] or (
            large == small + own and at < after - 1
        )


@dataclass(frozen=True)
class ChosenLayers:
    """Which layers of a repeating list are left. path: of the list, "" if all are.
    stages: for each stage of the small pipeline, the stage of the large one that it
    stands for. numbers: for each of them those of its layers in the large model."""

    path: str
    stages: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The large number of each small layer."""
        return tuple(n for own in self.numbers for n in own)

    def layers(self, place: int, large: Collection[int]) -> StageLayers:
        """The layers of a small stage, which stands for one that has the `large`
        ones."""
        own = self.numbers[place] if self.path else ()
        before = sum(map(len, self.numbers[:place]))
        begins = before, min(large, default=0)
        numbers = tuple(n - own[0] for n in own)
        return StageLayers(self.path, numbers, len(large), begins)

    @property
    def starts(self) -> tuple[str, ...]:
        """The layers that begin the stages but the first, by their small names; "" for
        what comes after them."""
        counts = accumulate(map(len, self.numbers[:-1]))
        every = len(self.order)
        return tuple(f"{self.path}.{n}" if n < every else "" for n in counts)

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
    """Returns the plan's mesh with other sizes of its axes."""
    return Mesh(tuple((axis, sizes[axis]) for axis, _ in plan.mesh.axes))


def small_sizes(
    plan: Plan, few: ChosenLayers | None, extents: Collection[Extent]
) -> Iterator[dict[str, int]]:
    """Axis -> its ranks in a small plan; of time its microbatches. The smallest first,
    for what extents are together may need more ranks than each of them does.

    An extent that gives less than one to each rank still does; one that is too small to
    be made smaller divides as it did. Those that stay do so too, if that takes no more
    than `AS_FIXED` times the ranks.
    """
    sizes = {axis: _few(plan, axis) for axis, _ in plan.mesh.axes}
    if few is not None and few.path:
        sizes[PIPELINE] = len(few.stages) // plan.stages_per_rank
    elif PIPELINE in sizes:
        sizes[PIPELINE] = plan.mesh.pipeline_ranks
    sizes[TIME] = _microbatches(plan, sizes.get(PIPELINE, 1))
    most, fitted = AS_FIXED * prod(sizes.values()), False
    free = [extent._replace(stays=False) for extent in extents]
    for own, ranks in ((extents, most), (free, inf)):
        for fitting in () if fitted else _fit(plan, sizes, own, ranks):
            fitted = True
            yield fitting
    if not fitted:
        yield sizes


def _few(plan: Plan, axis: str) -> int:
    size = plan.mesh.axis_size(axis)
    chained = axis == PIPELINE or has_rings(plan, axis)
    return size if size <= CHAIN else CHAIN if chained else FEW


def _fit(
    plan: Plan, least: dict[str, int], extents: Collection[Extent], most: float
) -> Iterator[dict[str, int]]:
    """Ranks, at least so many, over which each extent can divide as it does, over all
    of its axes at once: the fewest, then more, up to `most` in all."""
    axes = list(least)
    large = {axis: plan.size(axis) for axis in axes}
    waiting = [(prod(least.values()), *least.values())]
    known = {*waiting}
    splitting = {axis for own in extents for split in own.splits for axis in split}
    for _ in range(TRIES):
        if not waiting:
            break
        sizes = dict(zip(axes, heappop(waiting)[1:], strict=True))
        ways = ((n, Candidates(n, large, sizes)) for n in sorted(extents) if n.splits)
        odd = next((n for n, how in ways if not how.possible), None)
        if odd is None:
            yield sizes
        more_of = {a for s in odd.splits for a in s} if odd is not None else splitting
        for axis in more_of:
            more = {**sizes, axis: sizes[axis] + 1}
            one = (prod(more.values()), *more.values())
            if more[axis] <= large[axis] and one[0] <= most and one not in known:
                known.add(one)
                heappush(waiting, one)


def _microbatches(plan: Plan, pp: int) -> int:
    """Enough to fill a pipeline and to be in its steady state."""
    m = plan.microbatches
    if m == 1:
        return 1
    if pp == 1:
        return m if m <= CHAIN else FEW
    large = plan.mesh.pipeline_ranks
    if plan.stages_per_rank > 1:
        return min(m, pp if m < 2 * large else 2 * pp)
    return min(m, pp if m <= large else pp + 1)


def find_splits(sharded: Sharded) -> dict[Dim, frozenset[Split]]:
    """Named dim -> the axes that split it in some value, or that could have done so:
    how it divides decides whether they do."""
    named, plan = sharded.named, sharded.plan
    splits_of: dict[Dim, set[Split]] = {}
    lies = [(n.name, sharded.states[n.name]) for n in named.graph.sources]
    for node, needs in zip(named.graph.nodes, sharded.needs, strict=True):
        lies += [(v.name, sharded.states[v.name]) for v in node.results]
        lies += [(v.name, s) for v, s in zip(node.operands, needs, strict=True)]
    held = {v.name for v in named.graph.params}
    wanted = {
        axis: {preference.dim for preference in plan.preferences(axis)}
        for axis in plan.axes
    }
    for name, sharding in lies:
        for dim, slots in zip(named.dims[name], sharding.slots, strict=True):
            for d, axes in zip(dim, slots, strict=True):
                own = splits_of.setdefault(d, set())
                own.add(axes)
                own |= {(axis,) for axis in plan.axes if d.name in wanted[axis]}
                if name in held:  # see `split_parameter`
                    rest = [a for a in plan.parameter_axes if a not in axes]
                    own |= {(*axes, axis) for axis in rest}
    return {d: frozenset(s for s in splits if s) for d, splits in splits_of.items()}


def find_longest(sharded: Sharded, extents: Extents) -> frozenset[Bound]:
    """The bounds on extents of parameters' dims by the longest dim, as that decides
    which dim `split_parameter` splits."""
    named, pairs = sharded.named, set[tuple[int, int]]()
    for v in named.graph.params if sharded.plan.parameter_axes else ():
        sizes = [d.size for dim in named.dims[v.name] for d in dim]
        pairs |= {(n, max(sizes)) for n in sizes if n < max(sizes)}
    return frozenset(
        Bound((part,), (whole,))
        for n, most in pairs
        for part in extents.of_size(n)
        for whole in extents.of_size(most)
    )


def shrink_plan(plan: Plan, few: ChosenLayers, sizes: Mapping[str, int]) -> Plan:
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
        op_shardings={a: renamed(own) for a, own in plan.op_shardings.items()},
        recompute_layers=renamed(plan.recompute_layers),
    )


def thin(kinds: Sequence[object], keep: int) -> list[int]:
    """Which of some layers are enough: of a pattern that repeats, `keep` repeats. Where
    all layers are one pattern, it stays whole.

    kinds: of each layer, equal for layers that are alike.
    """
    return _thin(list(range(len(kinds))), kinds, keep, period(kinds) or 1)


def _thin(
    own: list[int], kinds: Sequence[object], keep: int, shortest: int
) -> list[int]:
    """Does `thin` for neighbours: cuts the longest repetition, then those before and
    after it. shortest: length of a pattern."""
    best, most = (0, 0, 0), 0
    for length in range(shortest, len(own) // (keep + 1) + 1):
        begin = 0
        for i in range(len(own) - length + 1):
            last = i == len(own) - length
            if last or kinds[own[i]] != kinds[own[i + length]]:
                more = (i - begin) // length + 1 - keep  # repeats than are kept
                if more * length > most:
                    best, most = (begin, length, more), more * length
                begin = i + 1
    if not most:
        return own
    begin, length, more = best
    middle = begin + keep * length
    before, after = own[:begin], own[middle + most :]
    return [
        *_thin(before, kinds, keep, shortest),
        *own[begin:middle],
        *_thin(after, kinds, keep, shortest),
    ]


def period(kinds: Sequence[object]) -> int:
    """The number of layers after which all repeats at least once; 0 if none."""
    lengths = range(1, len(kinds) // 2 + 1)
    return next((n for n in lengths if kinds[n:] == kinds[:-n]), 0)


def choose_layers(
    path: str,
    kinds: Sequence[object],
    by_stage: Sequence[Sequence[int]],
    plan: Plan,
    keep: int,
) -> ChosenLayers:
    """Which layers and which stages stand for all.

    kinds: of each layer of the list. by_stage: the layers of each stage, of which the
    first and the last may have none. Kept whole where stages share one.
    """
    every = ChosenLayers("", tuple(range(len(by_stage))), ())
    flat = [n for own in by_stage for n in own]
    if flat != list(range(len(kinds))) or not all(by_stage[1:-1]):
        return every
    thinned = [thin([kinds[n] for n in own], keep) for own in by_stage]
    kept = [
        tuple(own[i] for i in few) for own, few in zip(by_stage, thinned, strict=True)
    ]
    chosen = _choose_stages([[kinds[n] for n in own] for own in kept], plan)
    return ChosenLayers(path, tuple(chosen), tuple(kept[s] for s in chosen))


def _choose_stages(kinds: Sequence[Sequence[object]], plan: Plan) -> list[int]:
    """The first, the last, and one inside of each kind, on as few ranks as have them.

    kinds: of each stage those of the layers that it keeps.
    """
    ranks, last = plan.mesh.pipeline_ranks, len(kinds) - 1
    inside = range(1, last)
    new = [s for s in inside if kinds[s] not in kinds[1:s]]
    new += [s for s in inside if s not in new]
    for few in range(min(CHAIN, ranks), ranks):
        count = few * plan.stages_per_rank - 2
        rest = new[count:]
        if all(kinds[s] in [kinds[own] for own in new[:count]] for s in rest):
            return [0, *sorted(new[:count]), last]
    return list(range(len(kinds)))
