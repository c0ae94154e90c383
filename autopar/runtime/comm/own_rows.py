"""Rows of a field of the batch that this rank computes with, without the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.passes.mesh import TIME


@dataclass(frozen=True)
class OwnRows:
    """My share of a field over the axes that split the batch, before emitted code asks
    for it by `Comm.shard`: axis by axis, as of a field that is whole.

    parts: of each microbatch, [my rows, ...]; one where axes have no "time". axes:
    those that are still to be asked for, outermost first.
    """

    parts: tuple[Tensor, ...]
    axes: tuple[str, ...]

    def shard(self, axis: str, microbatch: int) -> Tensor | OwnRows:
        """What is left of it on an axis; the rows themselves on the last one. Ahead of
        the loop the rows of all microbatches are asked for, and not "time"."""
        if self.axes[0] == TIME != axis:
            every = OwnRows((torch.cat(self.parts),), self.axes[1:])
            return every.shard(axis, microbatch)
        assert axis == self.axes[0], "INPUTS tells: it asks for all axes in turn"
        parts = (self.parts[microbatch],) if axis == TIME else self.parts
        return OwnRows(parts, self.axes[1:]) if self.axes[1:] else parts[0]


Field = Tensor | OwnRows
"""What emitted code has of a field of the batch."""
