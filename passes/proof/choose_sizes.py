"""choose_sizes: a small size for each extent, that keeps what may matter of the large.

What may matter: how an extent divides over the axes that split it (evenly, with a rest,
or into fewer parts than there are ranks), which extents are the same and which differ,
which is the larger, and every sum that ops make of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import prod
from types import MappingProxyType

from ..errors import AutoparError
from ..proof.extents import MARGIN, Bound, Extent, Product, Sum

# Choices tried before sizes are given up as contradicting each other.
TRIES = 20_000


class NotShrunk(AutoparError):
    """No small sizes keep what the large ones have. extents: it might be otherwise if
    these stayed as they are."""

    def __init__(
        self,
        message: str,
        *,
        source: str = "",
        fix: str = "",
        extents: frozenset[Extent] = frozenset(),
    ) -> None:
        super().__init__(message, source=source, fix=fix)
        self.extents = extents


class Order(Enum):
    """How far small sizes keep the order of the large ones: strictly, wherever
    possible, only as to which differ, or not at all, with all as small as can be."""

    KEPT, TRIED, DIFFERENT, NONE = range(4)


# Extents of one size may mean different things, and want what no order allows.
WHERE_POSSIBLE = (Order.KEPT, Order.TRIED)


@dataclass(frozen=True)
class Divides:
    """Says how an extent divides over some ranks."""

    even: bool
    least: int  # of the smallest share: 0, 1, or 2 for more, as 1 is no dim to torch

    @classmethod
    def of(cls, extent: int, parts: int) -> Divides:
        """How an extent divides among `parts` ranks."""
        return cls(extent % parts == 0, min(extent // parts, 2))


def choose_sizes(
    sizes: Sequence[Extent],
    sums: Sequence[Sum[Extent]],
    large: Mapping[str, int],
    small: Mapping[str, int],
    products: Mapping[Product, Extent] = MappingProxyType({}),
    most: Collection[Bound] = (),
    orders: Sequence[Order] = WHERE_POSSIBLE,
) -> dict[Extent, int]:
    """Extent -> its small size.

    sizes: ascending. large, small: axis -> its ranks in the plan, and in the small one.
    products: factors that are split as one extent. most: what must hold between sizes.
    orders: the first of these in which there are some.
    Raises NotShrunk.
    """
    allowed = {n: Candidates(n, large, small) for n in sizes}
    whole = {p: Candidates(n, large, small) for p, n in products.items()}
    for order in orders:
        solution = _Solver(list(sizes), sums, allowed, whole, order, most).solve()
        if solution is not None:
            return solution
    raise NotShrunk(f"no small sizes stand for {', '.join(map(str, sizes))} together")


class Candidates:
    """The small sizes that an extent may have."""

    def __init__(
        self, extent: Extent, large: Mapping[str, int], small: Mapping[str, int]
    ) -> None:
        size, splits = extent.size, extent.splits
        self.size, self.fixed = size, extent.stays or size <= MARGIN
        # Nested axes divide what those before them left.
        prefixes = {s[: i + 1] for s in splits for i in range(len(s))}
        self.wanted = [
            (
                prod(small[a] for a in axes),
                Divides.of(size, prod(large[a] for a in axes)),
            )
            for axes in sorted(prefixes)
        ]
        # What is tried first: some of each part that ranks hold.
        self.unit = max((parts for parts, _ in self.wanted), default=1)

    def __contains__(self, n: int) -> bool:
        if self.fixed:
            return n == self.size
        return n >= 2 and self.fits(n)

    def fits(self, n: int) -> bool:
        """Whether n divides as the size does, over all axes that split it."""
        return all(Divides.of(n, parts) == how for parts, how in self.wanted)

    @property
    def possible(self) -> bool:
        """Whether a small size divides as it does; one that is fixed must itself."""
        return self.fits(self.size) if self.fixed else any(True for _ in self.above(2))

    def above(self, least: int) -> Iterator[int]:
        """Small sizes of at least `least`, ascending; the size itself, if it is
        fixed."""
        if self.fixed:
            yield self.size
            return
        least = max(least, 2)
        yield from (n for n in range(least, least + 8 * self.unit + 9) if n in self)


@dataclass
class _Solver:
    """Depth-first over the sizes, ascending; sums with one unknown decide it.

    Where the order is not kept, what no other size has become is tried before what one
    has, but for sizes that stay: few sizes become equal, not all.
    """

    sizes: list[Extent]
    sums: Sequence[Sum[Extent]]
    allowed: Mapping[Extent, Candidates]
    products: Mapping[Product, Candidates]
    order: Order
    most: Collection[Bound] = ()
    tries: int = 0

    def solve(self) -> dict[Extent, int] | None:
        start = {n: n.size for n in self.sizes if self.allowed[n].fixed}
        return self._extend(start)

    def _extend(self, known: dict[Extent, int]) -> dict[Extent, int] | None:
        self.tries += 1
        if self.tries > TRIES:
            return None
        known = dict(known)
        if not self._settle(known) or not self._ordered(known):
            return None
        if not all(
            how.fits(prod(known[n] for n in product))
            for product, how in self.products.items()
            if all(n in known for n in product)
        ):
            return None
        free = next((n for n in self.sizes if n not in known), None)
        if free is None:
            return known
        for candidate in self._candidates(free, known):
            solution = self._extend({**known, free: candidate})
            if solution is not None or self.tries > TRIES:
                return solution
        return None

    def _candidates(self, size: Extent, known: Mapping[Extent, int]) -> list[int]:
        allowed, below = self.allowed[size], [n for n in known if n < size]
        floors = (
            prod(known[n] for n in part) + gap
            for part, whole, gap in self.most
            if whole == (size,) and all(n in known for n in part)
        )
        floor = max(2, max(floors, default=2))
        least = floor
        if below:
            nearest = max(below, key=lambda n: (known[n], n))
            gap = size.size - nearest.size
            least = max(floor, known[nearest] + (gap if gap <= MARGIN else 1))
        if self.order == Order.NONE:
            return list(allowed.above(floor))
        ordered = self.order != Order.DIFFERENT
        candidates = list(allowed.above(least)) if ordered else []
        if self.order != Order.KEPT:
            rest = {*allowed.above(floor)} - {*candidates}
            others = {m for n, m in known.items() if not self.allowed[n].fixed}
            candidates += sorted(rest, key=lambda n: (n in others, n))
        return candidates

    def _settle(self, known: dict[Extent, int]) -> bool:
        """Computes the sizes that sums decide; False if a sum cannot hold."""
        changed = True
        while changed:
            changed = False
            for one in self.sums:
                unknown = one.factors - known.keys()
                if len(unknown) > 1:
                    continue
                if not unknown:
                    if one.rest(known) != 0:
                        return False
                    continue
                (n,) = unknown
                if not one.decides(n, known):
                    continue
                size = self._solve(one, n, known)
                if size is None or size not in self.allowed[n]:
                    return False
                known[n], changed = size, True
        return True

    @staticmethod
    def _solve(one: Sum[Extent], n: Extent, known: Mapping[Extent, int]) -> int | None:
        """A sum is linear in a size that no term has twice."""
        at = [one.rest({**known, n: x}) for x in (0, 1, 2)]
        slope = at[1] - at[0]
        if at[2] - at[1] != slope or not slope or -at[0] % slope:
            return None
        return -at[0] // slope

    def _ordered(self, known: Mapping[Extent, int]) -> bool:
        """Whether larger sizes are larger, as far as they must be."""
        for part, whole, gap in self.most:
            if all(n in known for n in (*part, *whole)):
                sizes = (prod(known[n] for n in product) for product in (part, whole))
                if next(sizes) + gap > next(sizes):
                    return False
        if self.order != Order.KEPT:
            return True
        chosen: dict[int, list[int]] = {}
        for n in self.sizes:
            if n in known and n.size:
                chosen.setdefault(n.size, []).append(known[n])
        return all(max(a) < min(b) for a, b in pairwise(chosen.values()))
