"""Token batches for training: the batch of a step depends on seed and step alone.

So a run that resumes at step 1000 needs no state but its count of steps, on another
mesh too, every rank draws the same global batch, and two plans that are compared see
the same tokens. That is why `autopar run` has no torchdata.StatefulDataLoader: it is
for iterators that only go forward, and what it keeps is of one rank, of a count of
workers, and of the way that ranks shared the samples out. A loop of one's own may use
it with `step(local=True)`, see `examples/guides/data.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from autopar.training.data.sources import open_tokens
from autopar.training.data.tokens import DataError, Tokens

Batch = tuple[Tensor, Tensor]
"""ids and labels, int64 [batch_size, seq]: labels[b, i] follows ids[b, i]."""


class Data(Protocol):
    """A source of batches."""

    @property
    def name(self) -> str:
        """The name of the data in errors."""

    def batch(self, step: int, batch_size: int, seq: int) -> Batch:
        """The batch of a step. Raises: DataError."""

    def count(self, seq: int) -> int:
        """How many sequences there are, if none overlaps. Raises: DataError."""

    def samples(self, numbers: np.ndarray, seq: int) -> Batch:
        """The samples of these numbers, int64, from 0."""

    def split(self, fraction: float) -> tuple[Data, Data]:
        """Splits off a share of the data: (to train with, held out)."""

    def digest(self) -> str:
        """A digest of the data, by which a resumed run knows that it is the same."""

    def apart(self, index: int) -> Data:
        """The same, with another source of chance."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Windows at random places of one long sequence of tokens.

    vocab: above the greatest id that the model has; of a batch, each is compared with
    it. stream: of which source of chance, of those of a seed.
    """

    name: str
    tokens: Tokens
    seed: int
    vocab: int
    stream: tuple[int, ...] = ()

    def batch(self, step: int, batch_size: int, seq: int) -> Batch:
        """Windows of seq + 1 tokens. Raises DataError where none fits."""
        draw = generator(self.seed, step, *self.stream)
        return self._read(draw.integers(self._places(seq), size=batch_size), seq)

    def count(self, seq: int) -> int:
        return (self._places(seq) - 1) // seq + 1

    def samples(self, numbers: np.ndarray, seq: int) -> Batch:
        return self._read(numbers * seq, seq)

    def _places(self, seq: int) -> int:
        """The number of begins of a sequence with a token after it. Raises:
        DataError."""
        places = len(self.tokens) - seq
        if places < 1:
            raise DataError(
                f"{self.name} has {len(self.tokens)} tokens, but a sequence of {seq} "
                f"and its labels need {seq + 1}",
                fix=f"use a longer text, or a context below {max(len(self.tokens), 1)}",
            )
        return places

    def _read(self, starts: np.ndarray, seq: int) -> Batch:
        windows = self.tokens.windows(starts, seq + 1)
        self._check(starts, windows)
        return shifted(windows)

    def _check(self, starts: np.ndarray, windows: np.ndarray) -> None:
        """Raises DataError for an id that the model has no embedding for."""
        if windows.min() >= 0 and windows.max() < self.vocab:
            return
        row, at = np.argwhere((windows < 0) | (windows >= self.vocab))[0]
        token = int(windows[row, at])
        fix = f"a model with a vocabulary above {token}, or tokens made for it"
        if token < 0:
            fix = "write token ids that are 0 or more"
        raise DataError(
            f"{self.name} has token {token} at "
            f"{self.tokens.place(int(starts[row] + at))}, but the model's vocabulary "
            f"is 0..{self.vocab - 1}",
            fix=fix,
        )

    def split(self, fraction: float) -> tuple[Data, Data]:
        """All but the end, and the end: no token is in both."""
        held = round(fraction * len(self.tokens))
        cut = len(self.tokens) - held
        held_out = f"the held-out end of {self.name}"
        return (
            replace(self, tokens=self.tokens.part(0, cut)),
            replace(self, name=held_out, tokens=self.tokens.part(cut, held)),
        )

    def digest(self) -> str:
        return self.tokens.digest()

    def apart(self, index: int) -> Data:
        return replace(self, stream=(*self.stream, index))


@dataclass(frozen=True)
class Synthetic:
    """Endless arithmetic progressions modulo vocab: made up, yet a model learns them.

    The stride is below 8, so that the next token follows from the last two.
    """

    vocab: int
    seed: int
    stream: tuple[int, ...] = ()
    name: str = "synthetic"

    def batch(self, step: int, batch_size: int, seq: int) -> Batch:
        """Sequences with a random first token and stride each."""
        draw = generator(self.seed, step, *self.stream)
        first = draw.integers(self.vocab, size=(batch_size, 1))
        stride = draw.integers(1, 8, size=(batch_size, 1))
        return shifted((first + stride * np.arange(seq + 1)) % self.vocab)

    def count(self, seq: int) -> int:
        raise DataError(
            "synthetic data has no end",
            fix="take some of it: --steps 100, --eval-batches 8",
        )

    def samples(self, numbers: np.ndarray, seq: int) -> Batch:
        raise AssertionError("nobody counted them")

    def split(self, fraction: float) -> tuple[Data, Data]:
        """Splits into these samples and others that are drawn anew: there is no end."""
        return self, self.apart(1)

    def digest(self) -> str:
        return f"synthetic, {self.vocab} tokens"

    def apart(self, index: int) -> Data:
        return replace(self, stream=(*self.stream, index))


@dataclass(frozen=True, eq=False)
class Mixture:
    """Draws each sample from one of several sources, by weight.

    weights: shares, of which the sum is 1.
    """

    sources: Sequence[Data]
    weights: Sequence[float]
    seed: int
    stream: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        pairs = zip(self.sources, self.weights, strict=True)
        return " and ".join(f"{weight:.3g} {each.name}" for each, weight in pairs)

    def batch(self, step: int, batch_size: int, seq: int) -> Batch:
        """Samples of all sources, in the order of the draw."""
        draw = generator(self.seed, step, *self.stream)
        drawn = draw.choice(len(self.sources), batch_size, p=self.weights)
        ids = torch.empty((batch_size, seq), dtype=torch.int64)
        labels = torch.empty_like(ids)
        for i, source in enumerate(self.sources):
            rows = torch.from_numpy(np.flatnonzero(drawn == i))
            if len(rows):
                ids[rows], labels[rows] = source.batch(step, len(rows), seq)
        return ids, labels

    def count(self, seq: int) -> int:
        """Counts the samples of all sources, whatever their weights."""
        return sum(source.count(seq) for source in self.sources)

    def samples(self, numbers: np.ndarray, seq: int) -> Batch:
        """The samples of these numbers, which count through one source after
        another."""
        ids = torch.empty((len(numbers), seq), dtype=torch.int64)
        labels = torch.empty_like(ids)
        first = 0
        for source in self.sources:
            end = first + source.count(seq)
            here = (numbers >= first) & (numbers < end)
            if here.any():
                rows = torch.from_numpy(np.flatnonzero(here))
                ids[rows], labels[rows] = source.samples(numbers[here] - first, seq)
            first = end
        return ids, labels

    def split(self, fraction: float) -> tuple[Data, Data]:
        """Splits each source in the same shares."""
        pairs = [source.split(fraction) for source in self.sources]
        train, held_out = ([pair[i] for pair in pairs] for i in (0, 1))
        return replace(self, sources=train), replace(self, sources=held_out)

    def digest(self) -> str:
        pairs = zip(self.sources, self.weights, strict=True)
        return ", ".join(f"{weight:.9g} {each.digest()}" for each, weight in pairs)

    def apart(self, index: int) -> Data:
        sources = [source.apart(index) for source in self.sources]
        return replace(self, sources=sources, stream=(*self.stream, index))


def open_data(
    specs: str | Sequence[str],
    vocab: int,
    seed: int = 0,
    opener: Callable[[str], Tokens] | None = None,
) -> Data:
    """The data that `specs` name; several are mixed, `a.bin:0.7` by that weight.

    specs: `stdlib`, the bytes of the Python standard library's own sources;
    `synthetic`, made up; or a file or folder, see `sources.open_tokens`. vocab: of the
    model. opener: of files and folders, else as `open_tokens` without options.
    Raises: DataError.
    """
    if vocab < 1:
        raise DataError(f"a vocabulary of {vocab} tokens", fix="give at least 1")
    read, sources, weights = opener or open_tokens, list[Data](), list[float | None]()
    for spec in (specs,) if isinstance(specs, str) else specs:
        name, weight = weighted(spec)
        data: Data = Synthetic(vocab, seed)
        if name != data.name:
            data = Corpus(name, read(name), seed, vocab)
        sources.append(data)
        weights.append(weight)
    if len(sources) == 1:
        return sources[0]
    shares = _shares(sources, weights)
    return Mixture([data.apart(i + 1) for i, data in enumerate(sources)], shares, seed)


def weighted(spec: str) -> tuple[str, float | None]:
    """`a.bin:0.7` -> ("a.bin", 0.7). Raises: DataError."""
    name, colon, text = spec.rpartition(":")
    try:
        weight = float(text)
    except ValueError:
        return spec, None
    if not colon or not name:
        return spec, None
    if not 0 < weight < math.inf:
        raise DataError(
            f"'{spec}' has weight {text}", fix=f"give one above 0: {name}:0.5"
        )
    return name, weight


def _shares(sources: Sequence[Data], weights: Sequence[float | None]) -> list[float]:
    """Divides by the sum of weights; without any, of tokens. Raises: DataError."""
    known = [weight for weight in weights if weight is not None]
    if not known and all(isinstance(data, Corpus) for data in sources):
        known = [float(len(d.tokens)) for d in sources if isinstance(d, Corpus)]
    if len(known) != len(sources):
        without = sources[weights.index(None)].name
        raise DataError(
            f"'{without}' has no weight, among {len(sources)} that are mixed",
            fix=f"give one to each: --data {without}:0.5",
        )
    return [weight / math.fsum(known) for weight in known]


def generator(seed: int, step: int, *stream: int) -> np.random.Generator:
    """Independent random numbers for all of these numbers, none negative."""
    return np.random.default_rng([seed, step, *stream])


def shifted(windows: np.ndarray) -> Batch:
    """Windows [batch, seq + 1] as contiguous ids and labels, int64 [batch, seq]."""
    tokens = torch.from_numpy(windows.astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
