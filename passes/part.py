"""Parts of the model's own parameters, as a graph's parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """The part of the model's own parameter that a graph's parameter is: the block of
    this shape that begins at `start` in parameter `source`."""

    source: str
    shape: tuple[int, ...]
    start: tuple[int, ...]


def part_name(part: Part, shape: Sequence[int]) -> str:
    """A part's name, `h.0.attn.qkv[0:32].weight`, which ends as the parameter's."""
    ranges = zip(part.start, shape, part.shape, strict=True)
    texts = [":" if n == whole else f"{at}:{at + n}" for at, n, whole in ranges]
    while texts and texts[-1] == ":":
        texts.pop()
    if not texts:
        return part.source
    before, dot, last = part.source.rpartition(".")
    index = f"[{','.join(texts)}]"
    return f"{before}{index}.{last}" if dot else f"{last}{index}"
