"""Checks that parameters of a large program rest, and their gradients are summed, as
those of a small one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, zip_longest
from math import prod

from ..dims.name_dims import UNNAMED
from ..graph import LAYER
from ..program import ParameterSpec, Program, StageSpec
from ..proof.extents import Extent, Product, size_of

Factors = tuple[tuple[int, ...], ...]  # of each dim
PIECE = re.compile(r"\[(?::,)*\d+:\d+\]")


def find_other_spec(
    large: Program,
    small: Program,
    sizes: Mapping[Extent, int],
    factors: Mapping[str, Sequence[Product]],
) -> str | None:
    """The name of a parameter that is not as any of its kind in the small program, or
    a word for what else is different; None if there is none.

    Layers count as alike: which of them a parameter is in makes no difference. sizes:
    extent -> small extent. factors: parameters as named in the small program -> for
    each dim what extents it is a product of in the large one.
    """
    pairs = pairs_of(sizes)
    known: dict[object, list[tuple[Factors, Factors | None]]] = {}
    for name, spec in small.tensors.items():
        grown = _grow(spec.factors, factors.get(name, ()), sizes)
        alike = known.setdefault((_kind(name), _facts(spec)), [])
        alike.append((spec.factors, grown))
    for name, spec in large.tensors.items():
        alike = known.get((_kind(name), _facts(spec)), [])
        if not any(_has_factors(spec.factors, *own, pairs) for own in alike):
            return name
    for number, stage in enumerate(large.stages):
        if (odd := _other_name(large, number, stage)) is not None:
            return odd
    for field in ("loss_pending", "groups"):
        if set(getattr(large, field)) != set(getattr(small, field)):
            return field
    if _lying(large) != _lying(small):
        return "an output"
    if large.plan.zigzag != small.plan.zigzag:
        return "zigzag"
    return None


def _lying(program: Program) -> dict[str, object]:
    """How each output lies, whatever its size."""
    outputs = program.outputs.items()
    return {name: (out.slots, out.pending, out.place) for name, out in outputs}


Pairs = frozenset[tuple[int, int]]  # of sizes, and what these are when small
NO_PAIRS: Pairs = frozenset()


def pairs_of(sizes: Mapping[Extent, int]) -> Pairs:
    """(large size, small one): several of a size, if some of its dims keep it."""
    return frozenset((extent.size, small) for extent, small in sizes.items())


@lru_cache(maxsize=1 << 16)
def stands_for(small: int, large: int, pairs: Pairs) -> bool:
    """Whether a number is a product of small sizes where another is of large ones."""
    return small == large or any(
        stands_for(small // s, large // n, pairs)
        for n, s in pairs
        if n > 1 and s > 1 and large % n == 0 and small % s == 0
    )


def find_shares(sizes: Pairs, axes: Collection[tuple[int, int]]) -> Pairs:
    """Extents, ranks, and what ranks have of extents. axes: ranks of each, and few."""
    parts = [
        (prod(n for n, _ in some), prod(n for _, n in some))
        for count in range(len(axes) + 1)
        for some in combinations(axes, count)
    ]
    # Where shares differ by one, other ranks have the larger ones of several extents.
    shares = {
        (large, small)
        for n, s in sizes
        for p, q in parts
        for large in {n // p, -(-n // p)}
        for small in {s // q, -(-s // q)}
        if (n % p == 0) == (s % q == 0)
    }
    return frozenset(shares.union(parts))


def _grow(
    factors: Factors, dims: Sequence[Product], sizes: Mapping[Extent, int]
) -> Factors | None:
    """What small factors are of in the large program, by the extents of each dim there;
    None where these do not tell, as of a part of a parameter."""
    grown = []
    for own, extents in zip_longest(factors, dims, fillvalue=()):
        left, large = list(extents), []
        for factor in own:
            here: list[Extent] = []
            while left and prod(sizes[n] for n in here) < factor:
                here.append(left.pop(0))
            if prod(sizes[n] for n in here) != factor:
                return None
            large.append(size_of(tuple(here)))
        grown.append(tuple(large))
    return tuple(grown)


def _has_factors(
    large: Factors, small: Factors, grown: Factors | None, pairs: Pairs
) -> bool:
    """Whether factors, of which axes split some, are those of the small parameter."""
    if grown is not None:
        return large == grown
    return all(
        len(ours) == len(theirs)
        and all(stands_for(s, n, pairs) for n, s in zip(ours, theirs, strict=True))
        for ours, theirs in zip(large, small, strict=True)
    )


def _other_name(program: Program, number: int, stage: StageSpec) -> str | None:
    """A parameter that a stage takes for another: names in texts count layers from the
    stage's first."""
    first: dict[str, int] = {}
    for layer in stage.layers:
        if (match := LAYER.search(layer)) is not None:
            path = layer[: match.start()]
            first[path] = min(int(match[1]), first.get(path, int(match[1])))
    for told, name in stage.names.items():
        match = LAYER.search(told)
        expected = told
        if match is not None and match[1].startswith("+"):
            path = told[: match.start()]
            place = first.get(path, 0) + int(match[1])
            expected = f"{path}{place}{told[match.end() :]}"
        spec = program.tensors.get(name)
        if name != expected or (spec is not None and number not in spec.stages):
            return name
    return None


def _kind(name: str) -> str:
    """The name without the numbers of layers and the bounds of pieces."""
    return PIECE.sub("[:]", LAYER.sub("*", name))


def _facts(spec: ParameterSpec) -> object:
    """All but sizes, and the names of stages."""
    dims = tuple(
        tuple("" if UNNAMED.fullmatch(d) else d for d in dim) for dim in spec.dims
    )
    several = len(spec.stages) > 1
    trained = spec.trainable and bool(spec.stages)
    return dims, spec.slots, spec.pending, spec.gathered, trained, several, spec.dtype
