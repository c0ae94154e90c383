"""Whether parameters of a large program rest, and their gradients are summed, as those
of a small one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from itertools import combinations
from math import prod

from passes.graph import LAYER
from passes.program import ParameterSpec, Program, StageSpec

UNNAMED = re.compile(r"^d\d+$")


def find_other_spec(
    large: Program, small: Program, sizes: Mapping[int, int]
) -> str | None:
    """The name of a parameter that is not as any of its kind in the small program, or
    a word for what else is different; None if there is none.

    Layers count as alike: which of them a parameter is in makes no difference. sizes:
    extent -> small extent.
    """
    pairs = frozenset(sizes.items())
    known: dict[object, list[ParameterSpec]] = {}
    for name, spec in small.parameters.items():
        known.setdefault((_kind(name), _facts(spec)), []).append(spec)
    for name, spec in large.parameters.items():
        alike = known.get((_kind(name), _facts(spec)), ())
        if not any(_has_factors(spec, own, pairs) for own in alike):
            return name
    for number, stage in enumerate(large.stages):
        if (odd := _other_name(large, number, stage)) is not None:
            return odd
    for what in ("loss_pending", "groups"):
        if set(getattr(large, what)) != set(getattr(small, what)):
            return what
    if large.plan.zigzag != small.plan.zigzag:
        return "zigzag"
    return None


Pairs = frozenset[tuple[int, int]]  # of sizes, and what these are when small


@lru_cache(maxsize=1 << 16)
def stands_for(small: int, large: int, pairs: Pairs) -> bool:
    """Whether a number is a product of small sizes where another is of large ones."""
    return small == large or any(
        stands_for(small // s, large // n, pairs)
        for n, s in pairs
        if n > 1 and s > 1 and large % n == 0 and small % s == 0
    )


def find_shares(sizes: Mapping[int, int], axes: Collection[tuple[int, int]]) -> Pairs:
    """Extents, ranks, and what ranks have of extents. axes: ranks of each, and few."""
    parts = [
        (prod(n for n, _ in some), prod(n for _, n in some))
        for count in range(len(axes) + 1)
        for some in combinations(axes, count)
    ]
    shares = {(n // p, s // q) for n, s in sizes.items() for p, q in parts}
    shares |= {(-(-n // p), -(-s // q)) for n, s in sizes.items() for p, q in parts}
    return frozenset(shares.union(parts))


def _has_factors(large: ParameterSpec, small: ParameterSpec, pairs: Pairs) -> bool:
    """Whether its factors, of which axes split some, are those in their order."""
    return all(
        len(ours) == len(theirs)
        and all(stands_for(s, n, pairs) for n, s in zip(ours, theirs, strict=True))
        for ours, theirs in zip(large.factors, small.factors, strict=True)
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
        spec = program.parameters.get(name)
        if name != expected or (spec is not None and number not in spec.stages):
            return name
    return None


def _kind(name: str) -> str:
    return LAYER.sub("*", name)


def _facts(spec: ParameterSpec) -> object:
    """All but sizes, and the names of stages."""
    dims = tuple(tuple("" if UNNAMED.match(d) else d for d in dim) for dim in spec.dims)
    several = len(spec.stages) > 1
    trained = spec.trainable and bool(spec.stages)
    return dims, spec.slots, spec.pending, spec.gathered, trained, several, spec.dtype
