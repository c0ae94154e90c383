"""pareto_front: the best trades of time for memory, over many decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """The costs of one way to decide."""

    seconds: float
    bytes: int


class Trade(NamedTuple):
    """One option of each decision: the sums, and which (by index)."""

    seconds: float
    bytes: int
    picked: tuple[int, ...]


def pareto_front(decisions: Sequence[Sequence[Option]]) -> Iterator[Trade]:
    """All trades that no other beats in both, the least seconds first.

    Exact, by dynamic programming over the decisions. An option that gains nothing over
    one before it is not picked; of equal trades, the first picks later options for
    earlier decisions.
    """
    # Whole picoseconds, so that sums in another order are equal.
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    for options in decisions:
        reached = sorted(
            (
                time + round(option.seconds * 1e12),
                size + option.bytes,
                # The picks as a number, a digit a decision, later options smaller.
                picks * len(options) + len(options) - 1 - index,
            )
            for time, size, picks in best
            for index, option in enumerate(options)
            if not any(_as_good(known, option) for known in options[:index])
        )
        best = []
        for state in reached:
            if not best or state[1] < best[-1][1]:
                best.append(state)
    for time, size, picks in best:
        picked = []
        for options in reversed(decisions):
            picks, digit = divmod(picks, len(options))
            picked.append(len(options) - 1 - digit)
        yield Trade(time / 1e12, size, tuple(reversed(picked)))


def _as_good(known: Option, option: Option) -> bool:
    return known.seconds <= option.seconds and known.bytes <= option.bytes
