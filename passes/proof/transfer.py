"""transfer: whether a large program is a small one but for its numbers.

Emitted texts are compared function by function and statement by statement, see
`read_text`: layers are loops there, so the large text has as many as the small one. The
numbers in them are equal, or sizes and smaller ones; those of layers, and where loops
over layers begin and end, are counted from the first or from the last, and each layer
has its turn (`layer_uses`). Dims are equal.

Which extents of a rank happen to be equal (its share of the sequence and the width of a
head) is not kept, and need not be. What a pass decides by it (which value, op, axis or
dim) is in the text, of which sizes alone may differ; and where it takes one size for
another that is equal, the number is the same. What runs looks at extents to refuse what
does not fit, but for an extent of 1, which `choose_sizes` keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ..proof.extents import Extent
from ..proof.find_dims import find_dims
from ..proof.layer_uses import find_out_of_turn
from ..proof.read_text import Counts, Number, Statement, read_module
from ..proof.same_specs import NO_PAIRS, Pairs, find_shares, pairs_of, stands_for
from ..proof.shrink_plan import StageLayers

SHOWN = 160  # characters of a statement in an error


@dataclass
class Difference:
    """The first difference between the texts of the large and the small program.
    function: of the module. large, small: the lines there, "" after the end."""

    function: str
    large: str
    small: str

    def __str__(self) -> str:
        large, small = (_short(x) or "nothing more" for x in (self.large, self.small))
        where = self.function or "its declarations"
        return f"in {where}: '{large}', where the small one has '{small}'"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


@dataclass(frozen=True)
class Sizes:
    """Extents, and what stands for them in the small program; with shares of ranks."""

    extents: Pairs
    shares: Pairs

    @classmethod
    def of(
        cls,
        extents: Mapping[Extent, int],
        axes: Collection[tuple[int, int]],
        positions: Pairs = NO_PAIRS,
    ) -> Sizes:
        """axes: ranks of each, and how many these are in the small program. positions:
        where dims are cut."""
        own = pairs_of(extents)
        return cls(own, find_shares(own | positions, axes))


def differs(
    large: str, small: str, sizes: Sizes, layers: StageLayers
) -> Difference | None:
    """None if a large module is the small one but for numbers."""
    big, few = (read_module(text, layers.path) for text in (large, small))
    for name in dict.fromkeys([*big, *few]):
        if name not in few or name not in big:
            return Difference(name, *(name * (name in m) for m in (big, few)))
        difference = _compare(name, big[name], few[name], layers, sizes)
        if difference is not None:
            return difference
    odd = find_out_of_turn(large, small, layers.path) if layers.path else None
    if odd is None:
        return None
    own, other = (f"{odd.name} of layers {n}" for n in (odd.large, odd.small))
    return Difference(odd.function, own, other)


def _compare(
    name: str,
    large: Sequence[Statement],
    small: Sequence[Statement],
    layers: StageLayers,
    sizes: Sizes,
) -> Difference | None:
    for ours, theirs in zip_longest(large, small, fillvalue=Statement("", ())):
        if ours.text != theirs.text:
            return Difference(name, ours.text.strip(), theirs.text.strip())
        numbers = zip(ours.numbers, theirs.numbers, strict=True)
        for i, (a, b) in enumerate(numbers):
            if not _alike(a, b, i in find_dims(ours.text), layers, sizes):
                told = (f"{s.text} {n.value:g}" for s, n in ((ours, a), (theirs, b)))
                return Difference(name, *told)
    return None


def _alike(a: Number, b: Number, dim: bool, layers: StageLayers, sizes: Sizes) -> bool:
    if b.counts is Counts.LAYERS:
        return layers.stands_for(int(b.value), int(a.value))
    if a == b:
        return True
    if b.counts is Counts.SOME:
        return layers.stands_for(int(b.value), int(a.value))
    if b.counts is Counts.MASKS:
        return a.value > b.value
    small, large = layers.begins
    if b.counts is Counts.BEFORE and a.value - b.value == large - small:
        return True
    if b.counts is Counts.ROWS and layers.are_rows(int(b.value), int(a.value)):
        return True
    of_size = b.counts in (Counts.BEFORE, Counts.ROWS)
    of_size |= b.counts is Counts.SIZE and not dim
    return of_size and _is_size(a, b.value, sizes)


def _is_size(number: Number, small: float, sizes: Sizes) -> bool:
    """Whether numbers are sizes, their inverses, or the roots of these (as in scaled
    attention)."""
    large = number.value
    if large == int(large) and small == int(small):
        pairs = sizes.extents if number.whole else sizes.shares
        return large * small > 0 and stands_for(abs(int(small)), abs(int(large)), pairs)
    if not (0 < large < 1 and 0 < small < 1):
        return False
    return any(
        all(abs(x**-n - round(x**-n)) < 1e-6 * x**-n for x in (large, small))
        and stands_for(round(small**-n), round(large**-n), sizes.shares)
        for n in (1, 2)
    )
