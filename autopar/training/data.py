"""Token batches for training: the batch of a step depends on seed and step alone.

So a run that resumes at step 1000 needs no state, every rank draws the same global
batch, and two plans that are compared see the same tokens.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from autopar.passes.errors import AutoparError

SCAN = 1 << 24  # tokens looked at in one go, so that a big file stays on disk


class DataError(AutoparError):
    """The data cannot be read, is too short, or has tokens that the model lacks."""


class Data(Protocol):
    """A source of batches."""

    def batch(self, step: int, batch_size: int, seq: int) -> tuple[Tensor, Tensor]:
        """ids and labels, int64 [batch_size, seq]: labels[b, i] follows ids[b, i]."""

    def split(self, fraction: float) -> tuple[Data, Data]:
        """Data to train with, and the held-out rest: so much of it."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Windows at random places of one long sequence of tokens.

    tokens: integers [length], in memory or mapped from a file.
    """

    name: str
    tokens: np.ndarray
    seed: int

    def batch(self, step: int, batch_size: int, seq: int) -> tuple[Tensor, Tensor]:
        """Windows of seq + 1 tokens. Raises DataError where none fits."""
        places = len(self.tokens) - seq
        if places < 1:
            raise DataError(
                f"{self.name} has {len(self.tokens)} tokens, but a sequence of {seq} "
                f"and its labels need {seq + 1}",
                fix=f"use a longer text, or a context below {max(len(self.tokens), 1)}",
            )
        starts = generator(self.seed, step).integers(places, size=batch_size)
        return shifted(self.tokens[starts[:, None] + np.arange(seq + 1)])

    def split(self, fraction: float) -> tuple[Data, Data]:
        """All but the end, and the end: no token is in both."""
        cut = len(self.tokens) - round(fraction * len(self.tokens))
        held_out = f"the held-out end of {self.name}"
        return (
            replace(self, tokens=self.tokens[:cut]),
            replace(self, name=held_out, tokens=self.tokens[cut:]),
        )


@dataclass(frozen=True)
class Synthetic:
    """Endless arithmetic progressions modulo vocab: made up, yet a model learns them.

    The stride is below 8, so that the next token follows from the last two. drawn: of
    which source of chance, of those of a seed.
    """

    vocab: int
    seed: int
    drawn: int = 0

    def batch(self, step: int, batch_size: int, seq: int) -> tuple[Tensor, Tensor]:
        """Sequences with a random first token and stride each."""
        draw = generator(self.seed, step, self.drawn)
        first = draw.integers(self.vocab, size=(batch_size, 1))
        stride = draw.integers(1, 8, size=(batch_size, 1))
        return shifted((first + stride * np.arange(seq + 1)) % self.vocab)

    def split(self, fraction: float) -> tuple[Data, Data]:
        """The same, and others that are drawn anew: there is no end."""
        return self, replace(self, drawn=self.drawn + 1)


def open_data(spec: str, vocab: int, seed: int = 0) -> Data:
    """The data that `spec` names, its tokens checked against the model's vocabulary.

    spec: `stdlib`, the bytes of the Python standard library's own sources;
          `synthetic`, made up; or a file: `.bin` (uint16, native byte order), `.npy`
          (integers, one dimension) or `.txt` (one token a byte).
    Raises: DataError.
    """
    if vocab < 1:
        raise DataError(f"a vocabulary of {vocab} tokens", fix="give at least 1")
    if spec == "synthetic":
        return Synthetic(vocab, seed)
    tokens = standard_library() if spec == "stdlib" else read_tokens(Path(spec))
    check_vocab(spec, tokens, vocab)
    return Corpus(spec, tokens, seed)


def standard_library(folder: Path | None = None) -> np.ndarray:
    """The bytes of the top-level sources in sorted order, uint8 [length]."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not text:
        raise DataError(
            f"no Python sources in {folder}: this Python has its library compiled only",
            fix="use another text file, or 'synthetic'",
        )
    return np.frombuffer(text, np.uint8)


def read_tokens(path: Path) -> np.ndarray:
    """The tokens of a file, mapped and not loaded, integers [length]."""
    if not path.is_file():
        raise DataError(
            f"no data named {str(path)!r}",
            fix="give 'stdlib', 'synthetic', or a .bin, .npy or .txt file that exists",
        )
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path} is empty", fix="write some tokens to it")
    if path.suffix == ".txt":
        return np.memmap(path, np.uint8, mode="r")
    if path.suffix == ".bin":
        if size % 2:
            raise DataError(
                f"{path} has {size} bytes, an odd number, but a token is 2 bytes",
                fix="write it as uint16, for example with numpy's tofile",
            )
        return np.memmap(path, np.uint16, mode="r")
    if path.suffix == ".npy":
        return read_array(path)
    raise DataError(
        f"{path}: unknown kind of file {path.suffix!r}",
        fix="name it .bin (uint16), .npy (integers) or .txt (bytes)",
    )


def read_array(path: Path) -> np.ndarray:
    """The integers [length] of an .npy file, mapped."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DataError(
            f"{path} is not a NumPy array file: {error}", fix="write it with numpy.save"
        ) from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(
            f"{path} holds {tokens.dtype}{list(tokens.shape)}, not integers in one row",
            fix="save tokens.astype(numpy.uint16).ravel()",
        )
    return tokens


def check_vocab(name: str, tokens: np.ndarray, vocab: int) -> None:
    """Find the first token that the model has no embedding for. Raises DataError."""
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and limits.max < vocab:
        return
    for start, part in chunks(tokens):
        bad = (part < 0) | (part >= vocab)
        if bad.any():
            at = int(bad.argmax())
            token = int(part[at])
            fix = f"a model with a vocabulary above {token}, or tokens made for it"
            if token < 0:
                fix = "write token ids that are 0 or more"
            raise DataError(
                f"{name} has token {token} at position {start + at}, "
                f"but the model's vocabulary is 0..{vocab - 1}",
                fix=fix,
            )


def chunks(tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each piece of SCAN tokens with its position."""
    for start in range(0, len(tokens), SCAN):
        yield start, tokens[start : start + SCAN]


def generator(seed: int, step: int, drawn: int = 0) -> np.random.Generator:
    """Independent random numbers for all of these numbers, none negative."""
    return np.random.default_rng([seed, step, drawn])


def shifted(windows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Windows [batch, seq + 1] as contiguous ids and labels, int64 [batch, seq]."""
    tokens = torch.from_numpy(windows.astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
