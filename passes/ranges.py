"""Ranges of the numbers that users give, the same for flags, keywords and files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType
from typing import Any

from .errors import AutoparError

SHOWN = 40  # characters of a wrong value


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, both included; whole: without fractions."""

    least: float
    most: float
    whole: bool = True

    def __contains__(self, value: Any) -> bool:
        """Whether a value is such a number. True and False are none."""
        kinds = (Integral,) if self.whole else (Integral, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        number: Any = value
        return bool(self.least <= number <= self.most)  # nan is in no range

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {_plain(self.least)} to {_plain(self.most)}"

    def parse(self, text: str) -> float | None:
        """Read a number of this range; None for any other text."""
        if not text.isascii() or "_" in text:  # Python's own spellings
            return None
        try:
            value = int(text) if self.whole else float(text)
        except ValueError:
            return None
        return value if value in self else None


# The ends are far from what anyone trains with, and near enough that loops over ranks,
# microbatches or samples come to an end.
RANKS = Range(1, 1 << 17)
RANGES: Mapping[str, Range] = MappingProxyType(
    {
        # of a plan
        "microbatches": Range(1, 1 << 16),
        "stages_per_rank": Range(1, 1 << 10),
        "zero": Range(0, 3),
        "loss_chunks": Range(1, 1 << 16),
        "memory": Range(0, 1 << 60),  # bytes
        # of batches
        "global_batch": Range(1, 1 << 24),
        "samples": Range(1, 1 << 24),
        "seq": Range(1, 1 << 24),
        # Of it and the step, 32 bits each, dropout masks are made.
        "seed": Range(0, (1 << 32) - 1),
        # of training
        "steps": Range(1, 10**9),
        "epochs": Range(0, 10**6),
        "lr": Range(0.0, 1000.0, whole=False),
        "min_lr": Range(0.0, 1000.0, whole=False),
        "decay_ratio": Range(0.0, 1.0, whole=False),
        "beta1": Range(0.0, 0.999999, whole=False),
        "beta2": Range(0.0, 0.999999, whole=False),
        "weight_decay": Range(0.0, 1000.0, whole=False),
        "ema": Range(0.0, 0.9999999, whole=False),
        "clip": Range(0.0, 1e9, whole=False),
        "eval_every": Range(0, 10**9),
        "eval_batches": Range(0, 10**6),
        "eval_fraction": Range(0.0, 0.9, whole=False),
        "log_every": Range(1, 10**9),
        "timeout": Range(1.0, 31 * 86_400.0, whole=False),  # seconds
        "warmup": Range(0, 10**9),
        "save_every": Range(0, 10**9),
        "keep": Range(1, 10**6),
        "ranks_per_node": Range(1, 1 << 10),
        # of what is written by a model
        "tokens": Range(1, 1 << 20),
        "temperature": Range(0.0, 1e6, whole=False),
        "top_k": Range(0, 1 << 30),
        # of measuring
        "seconds": Range(0.01, 3600.0, whole=False),
        # of a program
        "rank": Range(0, RANKS.most - 1),
        "stage": Range(0, RANKS.most - 1),
    }
)


def check_range(name: str, value: object, error: type[AutoparError]) -> None:
    """Raises `error` unless a value is in the range of its name."""
    if value not in RANGES[name]:
        raise error(f"{name}={shown(value)}", fix=f"use {RANGES[name]}")


def check_choice(
    name: str, value: object, choices: Iterable[object], error: type[AutoparError]
) -> None:
    """Raises `error` unless a value is one of the choices."""
    known = tuple(choices)  # not a set: a value of another type may have no hash
    if value not in known:
        fix = f"use one of {', '.join(map(repr, known))}"
        raise error(f"{name}={shown(value)}", fix=fix)


def shown(value: object) -> str:
    """A value as an error shows it: on one line, and short."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "a number of thousands of digits"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _plain(x: float) -> str:
    return f"{x:g}" if math.modf(x)[0] else f"{int(x)}"
