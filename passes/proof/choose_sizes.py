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

from ..errors import AutoparError
from ..proof.extents import MARGIN, Bound, Product, Sum

# Axes that split an extent, outermost first.
Split = tuple[str, ...]
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
        extents: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(message, source=source, fix=fix)
        self.extents = extents


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
    sizes: Sequence[int],
    sums: Sequence[Sum],
    fixed: frozenset[int],
    splits: Mapping[int, frozenset[Split]],
    large: Mapping[str, int],
    small: Mapping[str, int],
    products: Collection[Product] = (),
    most: Collection[Bound] = (),
    smallest: bool = False,
) -> dict[int, int]:
    """Size -> small size.

    sizes: ascending. splits: size -> the axes that split an extent of it, somewhere.
    large, small: axis -> its ranks in the plan, and in the small one. products: sizes
    that are split as one extent. most: what must hold between sizes.
    smallest: each as small as it can be, even if a smaller one was fixed.
    Raises NotShrunk.
    """
    allowed = {
        n: Candidates(n, splits.get(n, frozenset()), large, small, n in fixed)
        for n in sizes
    }
    whole = {p: Candidates(prod(p), splits[prod(p)], large, small) for p in products}
    # Extents of one size may mean different things, and want what no order allows.
    for order in (Order.NONE,) if smallest else (Order.KEPT, Order.TRIED):
        solution = _Solver(list(sizes), sums, allowed, whole, order, most).solve()
        if solution is not None:
            return solution
    raise NotShrunk(f"no small sizes stand for {', '.join(map(str, sizes))} together")


class Order(Enum):
    """Whether what is larger stays larger: always, wherever it can, or anyhow."""

    KEPT, TRIED, NONE = range(3)


class Candidates:
    """What a size may become."""

    def __init__(
        self,
        size: int,
        splits: frozenset[Split],
        large: Mapping[str, int],
        small: Mapping[str, int],
        fixed: bool = False,
    ) -> None:
        self.size, self.fixed = size, fixed or size <= MARGIN
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
        """Whether it divides as the size does, over all axes that split it."""
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
    has: few sizes become equal, not all.
    """

    sizes: list[int]
    sums: Sequence[Sum]
    allowed: Mapping[int, Candidates]
    products: Mapping[Product, Candidates]
    order: Order
    most: Collection[Bound] = ()
    tries: int = 0

    def solve(self) -> dict[int, int] | None:
        start = {n: n for n in self.sizes if self.allowed[n].fixed}
        return self._extend(start)

    def _extend(self, known: dict[int, int]) -> dict[int, int] | None:
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

    def _candidates(self, size: int, known: Mapping[int, int]) -> list[int]:
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
            gap = size - nearest
            least = max(floor, known[nearest] + (gap if gap <= MARGIN else 1))
        candidates = list(allowed.above(least)) if self.order != Order.NONE else []
        if self.order != Order.KEPT:
            rest, others = {*allowed.above(floor)} - {*candidates}, {*known.values()}
            candidates += sorted(rest, key=lambda n: (n in others, n))
        return candidates

    def _settle(self, known: dict[int, int]) -> bool:
        """Work out what sums decide; False if one cannot hold."""
        changed = True
        while changed:
            changed = False
            for one in self.sums:
                factors = [one.whole, *one.parts]
                unknown = {n for f in factors for n in f if n not in known}
                if len(unknown) > 1:
                    continue
                if not unknown:
                    if self._value(one, known) != 0:
                        return False
                    continue
                (n,) = unknown
                if not any(self._value(one, {**known, n: x}) for x in range(4)):
                    continue  # it holds for any, as twice a size is that and itself
                size = self._solve(one, n, known)
                if size is None or size not in self.allowed[n]:
                    return False
                known[n], changed = size, True
        return True

    @staticmethod
    def _value(one: Sum, known: Mapping[int, int]) -> int:
        def times(factors: tuple[int, ...]) -> int:
            return prod(known[n] for n in factors)

        return times(one.whole) - sum(map(times, one.parts)) - one.constant

    def _solve(self, one: Sum, n: int, known: Mapping[int, int]) -> int | None:
        """A sum is linear in a size that no term has twice."""
        at = [self._value(one, {**known, n: x}) for x in (0, 1, 2)]
        slope = at[1] - at[0]
        if at[2] - at[1] != slope or not slope or -at[0] % slope:
            return None
        return -at[0] // slope

    def _ordered(self, known: Mapping[int, int]) -> bool:
        """Whether larger sizes are larger, as far as they must be."""
        for part, whole, gap in self.most:
            if all(n in known for n in (*part, *whole)):
                sizes = (prod(known[n] for n in product) for product in (part, whole))
                if next(sizes) + gap > next(sizes):
                    return False
        chosen = [known[n] for n in self.sizes if n in known and n]
        return self.order != Order.KEPT or all(a < b for a, b in pairwise(chosen))
