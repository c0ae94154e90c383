"""Distributions of torch look into what they are given, to see whether it is valid. A
capture has no values to look into, and torch does without from 2.15 on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Within, only those look that were asked to."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
