"""Long sequences of tokens that stay on disk: several arrays, read as one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.passes.errors import AutoparError

# What tells data apart without reading all of it: so many stretches of so many tokens.
STRETCHES, LENGTH = 64, 64


class DataError(AutoparError):
    """The data cannot be read, is too short, or has tokens that the model lacks."""


@dataclass(frozen=True, eq=False)
class Piece:
    """tokens: integers [length], in memory or mapped. name: of their file. at: where in
    it they begin, in tokens."""

    name: str
    tokens: np.ndarray
    at: int = 0


@dataclass(frozen=True, eq=False)
class Tokens:
    """Pieces of tokens, one after another, which are read when they are used."""

    pieces: Sequence[Piece]
    ends: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        lengths = [len(piece.tokens) for piece in self.pieces]
        object.__setattr__(self, "ends", np.cumsum(lengths, dtype=np.int64))

    @classmethod
    def of(cls, name: str, tokens: np.ndarray) -> Tokens:
        """The tokens of one array."""
        return cls((Piece(name, tokens),))

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Reads `count` tokens from `start` on, int64 [count]."""
        return np.concatenate(
            [np.asarray(p.tokens, np.int64) for p in self.part(start, count).pieces]
        )

    def windows(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Reads `count` tokens from each start on, int64 [starts, count]."""
        if len(self.pieces) == 1:
            at = starts[:, None] + np.arange(count)
            return self.pieces[0].tokens[at].astype(np.int64)
        return np.stack([self.read(int(start), count) for start in starts])

    def part(self, start: int, count: int) -> Tokens:
        """The `count` tokens from `start` on, without reading them."""
        assert 0 <= start <= start + count <= len(self), "a part of what is there"
        pieces, stop = [], start + count
        i = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            piece, end = self.pieces[i], int(self.ends[i])
            first = start - (end - len(piece.tokens))
            last = min(stop, end) - (end - len(piece.tokens))
            pieces.append(
                replace(piece, tokens=piece.tokens[first:last], at=piece.at + first)
            )
            start, i = min(stop, end), i + 1
        return Tokens(tuple(pieces) or (Piece("nothing", np.empty(0, np.int64)),))

    def place(self, position: int) -> str:
        """Names the place of a token for messages: `position 12 of shard.bin`."""
        (piece,) = self.part(position, 1).pieces
        return f"position {piece.at} of {piece.name}"

    def digest(self) -> str:
        """What tells data apart, wherever it lies and however wide its integers are:
        its length, and stretches from all over it."""
        digest = hashlib.sha256(str(len(self)).encode())
        count = min(LENGTH, len(self))
        for start in np.linspace(0, len(self) - count, STRETCHES).astype(int):
            digest.update(self.read(int(start), count).astype("<i8").tobytes())
        return digest.hexdigest()[:16]
