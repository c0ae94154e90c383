"""Digests: numbers by which ranks compare what they hold without sending it."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1 << 16  # words in one go, so that what is computed of them stays in the cache
# Odd numbers of 64 bits without a pattern (of SplitMix64, Steele 2014, figure 13).
_PLACE, _FIRST, _SECOND = (
    n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@torch.no_grad()
def digest(x: Tensor) -> int:
    """Returns 64 bits that follow from the bits of all elements of x [...] and from
    their order, on any device. Other values, or the same ones permuted, have another
    digest but for one chance in 2**63 or so. x must not be on meta."""
    raw = torch.view_as_real(x) if x.is_complex() else x
    raw = raw.detach().contiguous().reshape(-1).view(torch.uint8)
    left, unaligned = -raw.numel() % 8, raw.storage_offset() % 8
    if left or unaligned:
        raw = F.pad(raw, (0, left)) if left else raw.clone()
    words = raw.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    places = torch.arange(min(CHUNK, words.numel()), device=x.device) * _PLACE
    for chunk in words.split(CHUNK):
        mixed = (chunk ^ places[: chunk.numel()]) * _FIRST
        mixed ^= mixed >> 27
        mixed *= _SECOND
        total = total * 31 + (mixed ^ (mixed >> 31)).sum()
    return int(total)


def digest_of_text(text: str) -> int:
    """The same of a text; in all processes alike, as `hash` is not."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
