"""even_ranks: move cuts until the slowest pipeline rank is as fast as that makes it.

Where a rank runs several stages, what it runs in all is what a step waits for: a rank
whose one stage ends with the loss may have the shorter one of another round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

Score = tuple[float, float, float]


def even_ranks(
    ends: Sequence[int], placement: Sequence[int], cost: Callable[[int, int], float]
) -> list[int]:
    """Better ends of stages, as numbers of places to cut at.

    ends: those to begin with, ascending. placement: the rank of each stage. cost: of a
    stage from one place to another. Each step moves one place from a stage of the
    slowest rank to any other stage, by all cuts between the two.
    """
    best = list(ends)
    score, slowest = _score(best, placement, cost)
    while True:
        tried = [
            (_score(moved, placement, cost), moved)
            for moved in _moves(best, placement, slowest)
        ]
        if not tried:
            return best
        (lowest, slow), moved = min(tried)
        if lowest >= score:
            return best
        best, score, slowest = moved, lowest, slow


def _moves(
    ends: Sequence[int], placement: Sequence[int], slowest: int
) -> Iterator[list[int]]:
    """Ends with one place less for a stage of the slowest rank."""
    for giver, rank in enumerate(placement):
        for taker in range(len(ends)) if rank == slowest else ():
            first, last, by = giver, taker, -1
            if taker < giver:
                first, last, by = taker, giver, +1
            moved = [e + by * (first <= i < last) for i, e in enumerate(ends)]
            if all(a < b for a, b in zip((0, *moved), moved, strict=False)):
                yield moved


def _score(
    ends: Sequence[int], placement: Sequence[int], cost: Callable[[int, int], float]
) -> tuple[Score, int]:
    """(the slowest rank's cost, the slowest stage's, all ranks' squares), its rank."""
    stages = [cost(a, b) for a, b in zip((0, *ends), ends, strict=False)]
    ranks = [0.0] * (max(placement) + 1)
    for rank, spent in zip(placement, stages, strict=True):
        ranks[rank] += spent
    slowest = max(range(len(ranks)), key=ranks.__getitem__)
    return (ranks[slowest], max(stages), sum(x * x for x in ranks)), slowest
