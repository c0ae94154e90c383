"""transfer: whether a large program is a small one but for its numbers.

Emitted texts are compared function by function and statement by statement, see
`read_text`: layers are loops there, so the large text has as many as the small one. The
numbers in them are equal, or sizes and smaller ones; those of layers outside of loops
are counted from the first or from the last. Dims are equal.

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

from passes.proof.find_dims import find_dims
from passes.proof.read_text import Number, Statement, read_module
from passes.proof.same_specs import stands_for

SHOWN = 160  # characters of a statement in an error


@dataclass
class Difference:
    """Where a text stops being the small one. function: of the module; large, small:
    what stands there in each, "" where it ended."""

    function: str
    large: str
    small: str

    def __str__(self) -> str:
        large, small = (_short(x) or "nothing more" for x in (self.large, self.small))
        where = self.function or "its declarations"
        return f"in {where}: '{large}', where the small one has '{small}'"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def differs(large: str, small: str, sizes: Mapping[int, int]) -> Difference | None:
    """None if a large module is the small one but for numbers. sizes: extent -> small
    extent."""
    big, few = read_module(large), read_module(small)
    # How many layers each loop has more.
    more = {a - b for a, b in zip(big.ends, few.ends, strict=False)}
    for name in dict.fromkeys([*big.functions, *few.functions]):
        if name not in few.functions or name not in big.functions:
            return Difference(name, *(name * (name in m.functions) for m in (big, few)))
        found = _compare(name, big.functions[name], few.functions[name], more, sizes)
        if found is not None:
            return found
    return None


def _compare(
    name: str,
    large: Sequence[Statement],
    small: Sequence[Statement],
    more: Collection[int],
    sizes: Mapping[int, int],
) -> Difference | None:
    """more: by how much numbers of layers may be larger."""
    for ours, theirs in zip_longest(large, small, fillvalue=Statement("", ())):
        if ours.text != theirs.text:
            return Difference(name, ours.text.strip(), theirs.text.strip())
        numbers = zip(ours.numbers, theirs.numbers, strict=True)
        for i, (a, b) in enumerate(numbers):
            if a == b or (a.layer and a.value - b.value in more):
                continue
            fixed = a.layer or i in find_dims(ours.text)
            if fixed or not _is_size(a, b.value, sizes):
                told = (f"{s.text} {n.value:g}" for s, n in ((ours, a), (theirs, b)))
                return Difference(name, *told)
    return None


def _is_size(number: Number, small: float, sizes: Mapping[int, int]) -> bool:
    """Whether numbers are sizes of more than one, or one of so many, or the root of
    that (as scores of attention are scaled)."""
    large = number.value
    if large == int(large) and small == int(small):
        if number.whole:
            return stands_for(int(small), int(large), sizes)
        return large * small > 0 and min(abs(large), abs(small)) > 1
    if not (0 < large < 1 and 0 < small < 1):
        return False
    return any(
        all(abs(x**-n - round(x**-n)) < 1e-6 * x**-n for x in (large, small))
        for n in (1, 2)
    )
