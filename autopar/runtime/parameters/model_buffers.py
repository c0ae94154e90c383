"""The buffers of a model and those that its step computes with, which are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor, nn


@dataclass
class _Pair:
    """A model's buffer, that of a step, and their versions when they were alike."""

    own: ref[Tensor]
    held: Tensor
    versions: tuple[int, int]


class ModelBuffers:
    """Keeps both alike where the model is on another device, so that there are two.

    held: those of the step, by name. It keeps none of the model alive; of one on the
    meta device there is nothing to keep.
    """

    def __init__(self, model: nn.Module, held: Mapping[str, Tensor]) -> None:
        own = {name: b for name, b in model.named_buffers() if not b.is_meta}
        both = ((own[name], x) for name, x in held.items() if name in own)
        self._pairs = [
            _Pair(ref(b), x, (b._version, x._version))
            for b, x in both
            if b.data_ptr() != x.data_ptr()
        ]

    @torch.no_grad()
    def read(self) -> None:
        """Reads, before a step, what a loop has written into the model's buffers."""
        for pair in self._pairs:
            own = pair.own()
            if own is not None and own._version != pair.versions[0]:
                pair.held.copy_(own)
                pair.versions = own._version, pair.held._version

    @torch.no_grad()
    def write(self) -> None:
        """Copies, after a step, the buffers that it has written to into the model's."""
        for pair in self._pairs:
            own = pair.own()
            if own is not None and pair.held._version != pair.versions[1]:
                own.copy_(pair.held)
                pair.versions = own._version, pair.held._version
