"""How many layers each pipeline stage gets, where all layers are alike.

The slowest stage is as fast as can be; exact, for stages that differ only in what the
first and the last do beside their layers.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from heapq import heapify, heappop, heapreplace


@lru_cache(maxsize=4096)  # candidates that differ in what they shard ask for the same
def balance_layers(
    layers: int, stages: int, layer: float, before: float, after: float
) -> tuple[int, ...] | None:
    """Layers of each stage, at least one; None if there are too few.

    layer: what a layer costs. before, after: what the first and the last stage cost
    beside theirs. Among equals the stages in the middle get no more than they must.
    """
    if stages > layers:
        return None
    if stages == 1:
        return (layers,)
    extra = [before, *[0.0] * (stages - 2), after]
    kinds = Counter(extra)  # of stages: few
    limits = sorted({k * layer + x for k in range(1, layers + 1) for x in kinds})

    def enough(limit: float) -> bool:
        room = sum(n * _most(limit, layer, x, layers) for x, n in kinds.items())
        return room >= layers and layer + max(extra) <= limit * (1 + 1e-12)

    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if enough(limits[middle]):
            high = middle
        else:
            low = middle + 1
    counts = [_most(limits[low], layer, x, layers) for x in extra]
    # Take away what is too much, where a stage is fullest.
    full = [(-counts[i] * layer - extra[i], -i) for i in range(stages)]
    heapify(full)
    for _ in range(sum(counts) - layers):
        while counts[-full[0][1]] == 1:
            heappop(full)
        i = -full[0][1]
        counts[i] -= 1
        heapreplace(full, (-counts[i] * layer - extra[i], -i))
    return tuple(counts)


def _most(limit: float, layer: float, extra: float, layers: int) -> int:
    """Layers that fit below a limit."""
    if layer <= 0:
        return layers
    fits = math.floor((limit - extra) / layer * (1 + 1e-12) + 1e-9)
    return max(1, min(layers, fits))
