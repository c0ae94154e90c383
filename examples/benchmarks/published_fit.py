"""Fitting: the constants with the least error over calibration rows, by a procedure;
and how well an order is predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

T = TypeVar("T")
LITTLE = 1e-4  # of an error: what is gained by less is not worth a step


def descend(
    start: T,
    error: Callable[[T], float],
    most: dict[str, float],
    step: float = 0.2,
    until: float = 0.02,
) -> T:
    """Steps along one constant at a time, each time the best one, which halve while
    nothing gets better.

    start: a dataclass. most: of its fields, those to fit, and how large each may get.
    step: the first, as a share of a constant; until: the least.
    """
    chosen: Any = start
    least = error(chosen)
    while step > until:
        tries: list[Any] = [
            replace(chosen, **{name: value})
            for name, limit in most.items()
            for factor in (1 + step, 1 / (1 + step))
            if (value := getattr(chosen, name) * factor) <= limit
        ]
        errors = [error(constants) for constants in tries]
        if min(errors) < least * (1 - LITTLE):
            least = min(errors)
            chosen = tries[errors.index(least)]
        else:
            step /= 2
    fitted: T = chosen
    return fitted


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's, of values without ties; 1 of a single one."""
    n, pairs = len(xs), zip(_places(xs), _places(ys), strict=True)
    apart = sum((a - b) ** 2 for a, b in pairs)
    return 1 - 6 * apart / (n * (n * n - 1)) if n > 1 else 1.0


def _places(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]
