"""Epochs: every sample once, in an order drawn anew for each, then all of them again.

The order is a keyed permutation of the samples' numbers, computed for those of a batch
alone: a Feistel network over a power of 4, walked until the number is one of a sample,
as in J. Black and P. Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002,
section 3, methods 2 and 3). So nothing is kept of a data set but its length, and the
count of steps is the position in the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.training.data.token_batches import Batch, Data, weighted
from autopar.training.data.tokens import DataError

ROUNDS = 6
U64 = np.uint64


def shuffled(numbers: np.ndarray, count: int, *key: int) -> np.ndarray:
    """The places of numbers below `count`, int64, in a permutation of range(count) that
    the key chooses."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    places = _crypt(numbers.astype(U64), half, keys)
    while (outside := places >= U64(count)).any():  # at most 3 of 4 are
        places[outside] = _crypt(places[outside], half, keys)
    return places.astype(np.int64)


def _crypt(numbers: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """A Feistel network over numbers of 2 * half bits."""
    mask = U64((1 << half) - 1)
    left, right = numbers >> U64(half), numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << U64(half)) | right


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 17)."""
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


@dataclass(frozen=True, eq=False)
class Epochs:
    """Samples that do not overlap, each once an epoch; a batch may have the last of one
    and the first of the next."""

    data: Data
    seed: int

    @classmethod
    def of(cls, data: Data, specs: Sequence[str], seed: int) -> Epochs:
        """specs: that named the data. Raises: DataError, if one has a weight."""
        if spec := next((s for s in specs if weighted(s)[1] is not None), ""):
            raise DataError(
                f"'{spec}' has a weight, but in --epochs each sample is there once",
                fix="leave weights out, or take --steps of samples drawn by them",
            )
        return cls(data, seed)

    @property
    def name(self) -> str:
        return self.data.name

    def batch(self, step: int, batch_size: int, seq: int) -> Batch:
        """Samples of a step: each epoch is a shuffle of all samples."""
        count = self.count(seq)
        position = step * batch_size + np.arange(batch_size)
        numbers = np.empty(batch_size, dtype=np.int64)
        for epoch in np.unique(position // count):
            now = position // count == epoch
            at = position[now] % count
            numbers[now] = shuffled(at, count, self.seed, int(epoch))
        return self.data.samples(numbers, seq)

    def steps(self, epochs: int, batch_size: int, seq: int) -> int:
        """Counts the steps of epochs, without a last batch that is not full."""
        return epochs * self.count(seq) // batch_size

    def count(self, seq: int) -> int:
        return self.data.count(seq)

    def samples(self, numbers: np.ndarray, seq: int) -> Batch:
        return self.data.samples(numbers, seq)

    def split(self, fraction: float) -> tuple[Data, Data]:
        train, held_out = self.data.split(fraction)
        return replace(self, data=train), held_out

    def digest(self) -> str:
        return f"epochs of {self.data.digest()}"

    def apart(self, index: int) -> Data:
        return replace(self, data=self.data.apart(index))
