"""Batches of other sizes than the one that is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def samples_of(batch: Mapping[str, Any]) -> int:
    """Samples in a batch: the length of most of its tensors."""
    lengths = [len(x) for x in batch.values() if isinstance(x, Tensor) and x.ndim]
    return max(lengths, key=lengths.count, default=1)


def with_samples(batch: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """The batch with `samples` samples: its own repeated in turn, or its first."""
    own = samples_of(batch)
    made = dict(batch)
    for name, x in batch.items():
        if own != samples and isinstance(x, Tensor) and x.ndim and len(x) == own:
            made[name] = x.repeat(-(-samples // own), *[1] * (x.ndim - 1))[:samples]
    return made
