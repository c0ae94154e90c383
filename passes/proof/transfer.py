"""transfer: whether a large program is a small one but for its numbers.

Emitted texts are compared function by function. A statement is what it says with its
numbers taken out, its variables named after where they were made (which layer, counted
from this one, and the how-manieth statement of it), and layers counted likewise: so
layers that are alike have equal statements, however many there are. What the large text
repeats more often than the small one must be whole chunks that the small one has too.

Which extents of a rank happen to be equal (its share of the sequence and the width of a
head) is not kept, and need not be. What a pass decides by it (which value, op, axis or
dim) is in the text, of which sizes alone may differ; and where it takes one size for
another that is equal, the number is the same. What runs looks at extents to refuse what
does not fit, but for an extent of 1, which `choose_sizes` keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from passes.proof.find_dims import find_dims
from passes.proof.read_text import Chunk, Numbers, Whole, collapse, read_functions
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
    """None if a large module is the small one but for numbers and repeats. sizes:
    extent -> small extent."""
    big, few = read_functions(large), read_functions(small)
    for name in [*big, *(n for n in few if n not in big)]:
        if name not in few or name not in big:
            return Difference(name, " ".join(name if name in big else ""), "")
        found = _compare(name, big[name], few[name], sizes)
        if found is not None:
            return found
    return None


def _compare(
    name: str, large: list[Chunk], small: list[Chunk], sizes: Mapping[int, int]
) -> Difference | None:
    kinds: dict[tuple[str, ...], int] = {}

    def numbered(chunks: Iterable[Chunk]) -> list[int]:
        return [kinds.setdefault(c.texts, len(kinds)) for c in chunks]

    left, right = collapse(numbered(large)), collapse(numbered(small))
    texts = list(kinds)
    if left != right:
        at = next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
            min(len(left), len(right)),
        )
        a = texts[left[at]] if at < len(left) else ()
        b = texts[right[at]] if at < len(right) else ()
        return Difference(name, *_first_difference(a, b))
    known: dict[tuple[str, ...], list[tuple[Numbers, ...]]] = {}
    for chunk in small:
        known.setdefault(chunk.texts, []).append(chunk.numbers)
    for chunk in large:
        alike = known[chunk.texts]
        if any(_explained(chunk.texts, chunk.numbers, own, sizes) for own in alike):
            continue
        for text, ours, theirs in zip(
            chunk.texts, chunk.numbers, alike[0], strict=True
        ):
            if not _explained((text,), (ours,), (theirs,), sizes):
                return Difference(name, f"{text} {ours}", f"{text} {theirs}")
    return None


def _first_difference(a: Sequence[str], b: Sequence[str]) -> tuple[str, str]:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return x, y
    short = min(len(a), len(b))
    return "".join(a[short : short + 1]), "".join(b[short : short + 1])


def _explained(
    texts: tuple[str, ...],
    large: tuple[Numbers, ...],
    small: tuple[Numbers, ...],
    sizes: Mapping[int, int],
) -> bool:
    """Whether numbers are equal, or sizes of more than one, or one of so many, or the
    root of that (as scores of attention are scaled). Dims are equal."""
    return all(
        xs == ys
        or all(
            a == b or (_is_size(a, b, sizes) and i not in find_dims(text))
            for i, (a, b) in enumerate(zip(xs, ys, strict=True))
        )
        for text, xs, ys in zip(texts, large, small, strict=True)
    )


def _is_size(large: float, small: float, sizes: Mapping[int, int]) -> bool:
    if large == int(large) and small == int(small):
        if isinstance(large, Whole):
            return stands_for(int(small), int(large), sizes)
        return large * small > 0 and min(abs(large), abs(small)) > 1
    if not (0 < large < 1 and 0 < small < 1):
        return False
    return any(
        all(abs(x**-n - round(x**-n)) < 1e-6 * x**-n for x in (large, small))
        for n in (1, 2)
    )
