"""least_cost: the choices that cost least together, found exactly.

Variables have a few choices each; tables say what some of them cost together. Tables of
a model's graph are local, so its variables are eliminated one by one: all tables with a
variable become one without it (Bertele and Brioschi 1972; bucket elimination, Dechter
1999). The time is exponential only in the most variables that meet in one table, which
is small for a chain of blocks. Blocks that repeat are eliminated once, what is left of
each is a matrix, and a row of them a product of matrices in which sums are minima.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

LARGEST = 20_000_000  # entries of a table


class TooEntangled(ValueError):
    """Too many variables meet for an exact answer."""


@dataclass(frozen=True)
class Table:
    """costs: float64, a dim for each of the variables; infinite is forbidden."""

    variables: tuple[int, ...]
    costs: Tensor

    def over(self, scope: Sequence[int]) -> Tensor:
        """The costs with a dim for each variable of the scope, 1 where there is none;
        the scope has all of the table's."""
        order = sorted(range(len(self.variables)), key=lambda d: self._at(d, scope))
        sizes = dict(zip(self.variables, self.costs.shape, strict=True))
        shape = [sizes.get(v, 1) for v in scope]
        return self.costs.permute(order).reshape(shape)

    def _at(self, d: int, scope: Sequence[int]) -> int:
        return scope.index(self.variables[d])


def add(tables: Iterable[Table], scope: Sequence[int], sizes: Sequence[int]) -> Table:
    """One table in the place of some. sizes: how many choices each variable has."""
    shape = [sizes[v] for v in scope]
    if math.prod(shape) > LARGEST:
        raise TooEntangled(f"{len(scope)} choices depend on each other: {shape}")
    total = torch.zeros(shape, dtype=torch.float64)
    for table in tables:
        total = total + table.over(scope)
    return Table(tuple(scope), total)


@dataclass(frozen=True)
class Reduced:
    """What variables cost once all others are chosen as is best for them.

    table: over what was kept. steps: for each variable that is gone, last first, those
    that its best choice depends on, and that choice for each of theirs.
    """

    table: Table
    steps: tuple[tuple[int, tuple[int, ...], Tensor], ...]

    def complete(self, chosen: Mapping[int, int]) -> dict[int, int]:
        """The best choices of all variables, given those of the kept."""
        complete = {v: chosen[v] for v in self.table.variables}
        for variable, others, best in self.steps:
            complete[variable] = int(best[tuple(complete[v] for v in others)])
        return complete

    def solve(self) -> tuple[float, dict[int, int]]:
        """The least cost, and choices that have it."""
        costs = self.table.costs
        least = int(costs.argmin())
        spots = torch.unravel_index(torch.tensor(least), costs.shape)
        chosen = {v: int(i) for v, i in zip(self.table.variables, spots, strict=True)}
        return float(costs.flatten()[least]), self.complete(chosen)


def reduce(
    tables: Sequence[Table], sizes: Sequence[int], keep: Sequence[int] = ()
) -> Reduced:
    """Eliminate every variable of the tables that is not to be kept, the one that ties
    together the fewest others first (min-fill)."""
    of: dict[int, set[int]] = {}  # variable -> tables with it
    left = dict(enumerate(tables))
    for i, table in left.items():
        for v in table.variables:
            of.setdefault(v, set()).add(i)
    near = {v: {w for i in own for w in left[i].variables} - {v}
            for v, own in of.items()}  # fmt: skip
    waiting = {v: _fill(v, near) for v in of if v not in keep}
    steps = []
    while waiting:
        v = min(waiting, key=lambda v: (waiting[v], len(near[v]), v))
        del waiting[v]
        scope = (*sorted(near[v]), v)
        joined = add((left.pop(i) for i in sorted(of[v])), scope, sizes)
        least, best = joined.costs.min(dim=-1)
        steps.append((v, scope[:-1], best))
        new = len(tables) + len(steps)
        left[new] = Table(scope[:-1], least)
        for w in near.pop(v):
            of[w] = {i for i in of[w] if i in left} | {new}
            near[w] = (near[w] | set(scope)) - {v, w}
        touched = {x for w in scope[:-1] for x in (w, *near[w])}
        waiting.update((x, _fill(x, near)) for x in touched & waiting.keys())
    return Reduced(add(left.values(), tuple(keep), sizes), tuple(reversed(steps)))


def _fill(v: int, near: Mapping[int, set[int]]) -> int:
    """Pairs of neighbours that know each other only through the variable."""
    own = near[v]
    return sum(len(own - near[w]) - 1 for w in own) // 2


# --- Blocks that repeat -------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One of equal blocks in a row, which the tables describe once.

    inner: its variables. before: those of the block before it that meet it; after: its
    own that stand in their place for the next block, in the same order. times: how
    often the block is there.
    """

    inner: frozenset[int]
    before: tuple[int, ...]
    after: tuple[int, ...]
    times: int


@dataclass(frozen=True)
class Chosen:
    """cost: the least. choices: variable -> its choice, of those outside of the block
    too. copies: the same for each copy of the block, in order."""

    cost: float
    choices: Mapping[int, int]
    copies: tuple[Mapping[int, int], ...] = ()


def least_cost(
    tables: Sequence[Table], sizes: Sequence[int], block: Block | None = None
) -> Chosen:
    """The choices that cost least. sizes: how many choices each variable has.

    Raises: TooEntangled.
    """
    if block is None:
        return Chosen(*reduce(tables, sizes).solve())
    own = [t for t in tables if owns(block, t.variables)]
    others = [t for t in tables if not owns(block, t.variables)]
    scope = {v for t in own for v in t.variables} - block.inner
    outer = tuple(sorted(scope - set(block.before)))
    once = reduce(own, sizes, (*block.before, *block.after, *outer))
    chain = _Chain(once.table, sizes, block, outer)
    cost, choices = reduce([*others, chain.table], sizes).solve()
    walk = chain.walk(choices)
    inside: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[int, int]] = {}
    for before, after in dict.fromkeys(walk):  # copies with equal ends are equal
        ends = dict(zip(block.before, before, strict=True))
        ends |= dict(zip(block.after, after, strict=True))
        within = once.complete({**{v: choices[v] for v in outer}, **ends})
        inside[before, after] = within
    return Chosen(cost, choices, tuple(inside[ends] for ends in walk))


def owns(block: Block, variables: Iterable[int]) -> bool:
    """Whether a table over some variables is the block's own. What meets it through
    `after` alone belongs to the block that follows."""
    scope = set(variables)
    inside = block.inner & scope
    follows = inside <= set(block.after) and not scope <= block.inner | {*block.before}
    return bool(inside) and not follows


class _Chain:
    """Copies of a block in a row: what they cost by how the first begins and the last
    ends, and which ends in between are best."""

    def __init__(
        self, once: Table, sizes: Sequence[int], block: Block, outer: tuple[int, ...]
    ) -> None:
        self.block, self.outer = block, outer
        self.shape = [sizes[v] for v in block.after]
        self.around = [sizes[v] for v in outer]
        ends = math.prod(self.shape)
        one = once.costs.reshape(ends, ends, math.prod(self.around))
        total, self.best = one, []
        for _ in range(block.times - 1):
            total, best = (total[:, :, None] + one[None]).min(dim=1)
            self.best.append(best)
        costs = total.reshape(self.shape + self.shape + self.around)
        self.table = Table((*block.before, *block.after, *outer), costs)

    def walk(
        self, choices: Mapping[int, int]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The choices at the begin and the end of each copy."""
        first = self._flat(choices, self.block.before, self.shape)
        last = self._flat(choices, self.block.after, self.shape)
        outer = self._flat(choices, self.outer, self.around)
        row = [last]
        for best in reversed(self.best):
            row.append(int(best[first, row[-1], outer]))
        row.append(first)
        ends = [self._apart(i) for i in reversed(row)]
        return list(pairwise(ends))

    @staticmethod
    def _flat(
        choices: Mapping[int, int], variables: Collection[int], shape: Sequence[int]
    ) -> int:
        place = 0
        for v, size in zip(variables, shape, strict=True):
            place = place * size + choices[v]
        return place

    def _apart(self, flat: int) -> tuple[int, ...]:
        spots = []
        for size in reversed(self.shape):
            flat, spot = divmod(flat, size)
            spots.append(spot)
        return tuple(reversed(spots))
