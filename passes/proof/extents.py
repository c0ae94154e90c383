"""extents: the sizes that dims of a captured graph have, and what holds between them.

See `find_extents`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
# Axes that split an extent, outermost first.
Split = tuple[str, ...]
# Segments of at most so many elements are a shift or an overlap, and stay as they are.
MARGIN = 4


class Extent(NamedTuple):
    """Dims that change together: those of one size that the same axes split.

    stays: its size follows from what ops say (a kernel, a loop that was unrolled).
    splits: the axes that split such a dim somewhere, ascending.
    """

    size: int
    stays: bool = False
    splits: tuple[Split, ...] = ()

    def __str__(self) -> str:
        return str(self.size)


# A product of extents that stay factors: `(heads head_dim)` as (12, 64).
Product = tuple[Extent, ...]


def size_of(product: Product) -> int:
    """How large a dim of these factors is."""
    return prod(extent.size for extent in product)


class Bound(NamedTuple):
    """A product of extents that stays at most as large as another, less the gap."""

    part: Product
    whole: Product
    gap: int = 0


@dataclass(frozen=True)
class Sum(Generic[T]):
    """A whole is the sum of these, each a product of factors, and a constant."""

    whole: tuple[T, ...]
    parts: tuple[tuple[T, ...], ...]
    constant: int = 0

    @property
    def factors(self) -> set[T]:
        """All that the sum is between."""
        return {n for product in (self.whole, *self.parts) for n in product}

    def rest(self, sizes: Mapping[T, int]) -> int:
        """The whole minus its parts: 0 where it is their sum."""

        def times(product: tuple[T, ...]) -> int:
            return prod(sizes[n] for n in product)

        return times(self.whole) - sum(map(times, self.parts)) - self.constant

    def decides(self, unknown: T, known: Mapping[T, int]) -> bool:
        """Whether it does not hold for any, as twice a size is that and itself."""
        return any(self.rest({**known, unknown: x}) for x in range(4))

    def __str__(self) -> str:
        parts = " + ".join("*".join(map(str, p)) for p in self.parts)
        return f"{'*'.join(map(str, self.whole))} = {parts} + {self.constant}"


@dataclass(frozen=True)
class Extents:
    """factors: value name -> for each tensor dim the extents it is a product of. sums:
    what must hold between them. fixed: extents that count things (the tensors of a
    stack), which no change of size changes. segments: (value, dim) -> the positions at
    which ops cut it -> the extents up to there, as sums of products. most: what is
    chosen is no more than there are. windows: numbers that positions are compared with,
    or shifted by, are less than there are of these. products: factors that are split as
    one extent -> this one."""

    factors: Mapping[str, tuple[Product, ...]]
    sums: tuple[Sum[Extent], ...]
    fixed: frozenset[Extent]
    segments: Mapping[tuple[str, int], Mapping[int, tuple[Product, ...]]]
    most: frozenset[Bound] = frozenset()
    windows: frozenset[Bound] = frozenset()
    products: Mapping[Product, Extent] = field(default_factory=dict)

    @property
    def sizes(self) -> list[Extent]:
        """All distinct extents of factors, ascending."""
        sizes = {n for dims in self.factors.values() for d in dims for n in d}
        for cut in self.segments.values():
            sizes.update(n for parts in cut.values() for p in parts for n in p)
        sizes.update(n for one in self.sums for part in one.parts for n in part)
        return sorted(sizes)

    def of_size(self, size: int) -> list[Extent]:
        """All that are so large."""
        return [extent for extent in self.sizes if extent.size == size]

    def positions(self, sizes: Mapping[Extent, int]) -> frozenset[tuple[int, int]]:
        """The positions at which ops cut dims: (as they are, with the small sizes)."""
        cuts = {parts for cut in self.segments.values() for parts in cut.values()}
        return frozenset(
            (sum(map(size_of, parts)), sum(prod(sizes[n] for n in p) for p in parts))
            for parts in cuts
        )

    def keep(self, extents: Collection[Extent]) -> Extents:
        """Marks these extents as ones whose sizes stay."""
        return self._changed(
            {extent: extent._replace(stays=True) for extent in extents}
        )

    @property
    def united(self) -> Extents:
        """The extents, those of equal size as one."""
        return self.unite(self.sizes)

    def unite(self, extents: Collection[Extent]) -> Extents:
        """Unites those of these extents that have equal size. The result stays if one
        of them does, and the axes of all of them split it."""
        alike: dict[int, list[Extent]] = {}
        for extent in extents:
            alike.setdefault(extent.size, []).append(extent)
        other = {}
        for size, own in alike.items():
            splits = {split for extent in own for split in extent.splits}
            stays = any(extent.stays for extent in own)
            one = Extent(size, stays, tuple(sorted(splits)))
            other.update(dict.fromkeys(own, one))
        return self._changed(other)

    def _changed(self, other: Mapping[Extent, Extent]) -> Extents:
        def product(own: Product) -> Product:
            return tuple(other.get(extent, extent) for extent in own)

        def products(own: tuple[Product, ...]) -> tuple[Product, ...]:
            return tuple(map(product, own))

        def bounds(own: Collection[Bound]) -> frozenset[Bound]:
            return frozenset(Bound(product(a), product(b), gap) for a, b, gap in own)

        return replace(
            self,
            factors={name: products(own) for name, own in self.factors.items()},
            sums=tuple(
                Sum(product(one.whole), products(one.parts), one.constant)
                for one in self.sums
            ),
            fixed=frozenset(product(tuple(self.fixed))),
            segments={
                place: {at: products(parts) for at, parts in own.items()}
                for place, own in self.segments.items()
            },
            most=bounds(self.most),
            windows=bounds(self.windows),
            products={product(own): one for own, one in self.products.items()},
        )
