"""Balances layers over pipeline stages, where all layers are alike.

The slowest rank is as fast as can be; exact, for stages that differ only in what the
first and the last do beside their layers.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from heapq import heapify, heappop, heapreplace


def balance_layers(
    layers: int, stages: int, layer: float, before: float, after: float
) -> tuple[int, ...] | None:
    """Layers of each stage, at least one; None if there are too few.

    layer: what a layer costs. before, after: what the first and the last stage cost
    beside theirs. Among equals the stages in the middle get no more than they must.
    """
    return balance_ranks(layers, tuple(range(stages)), layer, before, after)


@lru_cache(maxsize=4096)  # candidates that differ in what they shard ask for the same
def balance_ranks(
    layers: int, placement: tuple[int, ...], layer: float, before: float, after: float
) -> tuple[int, ...] | None:
    """The same where ranks run several stages: all of a rank's stages together are
    balanced, and of each rank its own.

    placement: the rank of each stage; each has as many.
    """
    stages, ranks = len(placement), max(placement) + 1
    if stages > layers:
        return None
    beside = [before, *[0.0] * (stages - 1)]
    beside[-1] += after
    whole = [0.0] * ranks
    for rank, x in zip(placement, beside, strict=True):
        whole[rank] += x
    totals = _balance(layers, tuple(whole), layer, stages // ranks)
    if stages == ranks:
        return tuple(totals[rank] for rank in placement)
    of_stage = [0] * stages
    stages_of: list[list[int]] = [[] for _ in range(ranks)]
    for stage, rank in enumerate(placement):
        stages_of[rank].append(stage)
    for own, total in zip(stages_of, totals, strict=True):
        parts = _balance(total, tuple(beside[stage] for stage in own), layer, 1)
        for stage, count in zip(own, parts, strict=True):
            of_stage[stage] = count
    return tuple(of_stage)


@lru_cache(maxsize=4096)  # most ranks are alike
def _balance(
    layers: int, extra: tuple[float, ...], layer: float, least: int
) -> tuple[int, ...]:
    """Layers of each part, at least `least`, with the slowest part as fast as possible.

    extra: what parts cost beside their layers.
    """
    if len(extra) == 1:
        return (layers,)
    kinds = Counter(extra)  # of parts: few
    limits = _limits(layers, extra, layer, least)

    def most(limit: float, extra: float) -> int:
        """Layers that fit below a limit."""
        if layer <= 0:
            return layers
        fits = math.floor((limit - extra) / layer * (1 + 1e-12) + 1e-9)
        return max(least, min(layers, fits))

    def enough(limit: float) -> bool:
        room = sum(n * most(limit, x) for x, n in kinds.items())
        least_of_all = least * layer + max(extra)
        return room >= layers and least_of_all <= limit * (1 + 1e-12)

    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if enough(limits[middle]):
            high = middle
        else:
            low = middle + 1
    counts = [most(limits[low], x) for x in extra]
    # Take away what is too much, where a part is fullest.
    full = [(-counts[i] * layer - extra[i], -i) for i in range(len(extra))]
    heapify(full)
    for _ in range(sum(counts) - layers):
        while counts[-full[0][1]] == least:
            heappop(full)
        i = -full[0][1]
        counts[i] -= 1
        heapreplace(full, (-counts[i] * layer - extra[i], -i))
    return tuple(counts)


def _limits(
    layers: int, extra: tuple[float, ...], layer: float, least: int
) -> list[float]:
    """What the slowest part may take, where all together are as fast as can be.

    No less than parts take on average, and a layer more is enough for all that rounding
    leaves over; or a part has the least layers, and more beside than others take.
    """
    kinds, average = set(extra), (layers * layer + sum(extra)) / len(extra)
    limits = {least * layer + x for x in kinds}
    for x in kinds if layer > 0 else ():
        near = math.floor((average - x) / layer)
        counts = range(max(least, near - 1), min(layers, near + 3) + 1)
        limits |= {k * layer + x for k in counts}
    return sorted(limits)
