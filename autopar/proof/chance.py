"""Numbers drawn by chance, the same for the same seed and name on any machine."""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Generator, Tensor


def dtype_of(kind: torch.dtype | str) -> torch.dtype:
    """A dtype, or the one of that name."""
    return kind if isinstance(kind, torch.dtype) else getattr(torch, kind)


def generator_of(seed: int, name: str) -> Generator:
    """Returns the generator of one tensor: its numbers depend on seed and name
    alone."""
    return Generator().manual_seed(crc32(f"{seed} {name}".encode()))  # of 32 bits


def uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Draws numbers in [0, 1), float64."""
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def signs(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """1 and -1, float64."""
    return torch.where(uniform(shape, generator) < 0.5, -1.0, 1.0).double()
