"""The minimum cut of a network: how little has to be cut to part its ends."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise


def minimum_cut(
    widths: Mapping[tuple[int, int], float], source: int, sink: int
) -> frozenset[int]:
    """The nodes on the sink's side of the minimum cut that is nearest to it.

    widths: of each edge, from a node to a node; no path from the source to the sink may
    be of edges of infinite width alone. By augmenting shortest paths (Edmonds and Karp
    1972).
    """
    free: dict[int, dict[int, float]] = defaultdict(dict)
    for (a, b), width in widths.items():
        free[a][b] = free[a].get(b, 0) + width
        free[b].setdefault(a, 0)
    while source in (following := _towards(free, sink)):
        path = [source]
        while path[-1] != sink:
            path.append(following[path[-1]])
        steps = [*pairwise(path)]
        flow = min(free[a][b] for a, b in steps)
        assert flow < math.inf, "what has no width keeps the ends together"
        for a, b in steps:
            free[a][b] -= flow
            free[b][a] += flow
    return frozenset(following)


def _towards(free: Mapping[int, Mapping[int, float]], sink: int) -> dict[int, int]:
    """What can still flow to the sink -> the next node on the shortest way there."""
    following = {sink: sink}
    nearest = [sink]
    for b in nearest:
        for a in free[b]:
            if a not in following and free[a][b] > 0:
                following[a] = b
                nearest.append(a)
    return following
