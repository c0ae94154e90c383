"""Batches of which each rank has loaded its own samples only.

Ranks that the batch is split over load different samples, and those that differ in
another axis alone (tp, pp, cp) the same. A step makes the global batch of them, so that
labels are counted, and masks of dropout drawn, as if every rank had it: of tokens that
is 16 bytes each, where a token's activations are thousands in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from autopar.models.batches import samples_of
from autopar.passes.mesh import TIME
from autopar.passes.plan import Plan
from autopar.runtime.comm.comm import Comm


class DataRank:
    """Which part of a global batch a rank loads.

    size: parts, the product of the plan's axes that split the batch. index: this
    rank's, in the order of the global batch: its rows are the index-th of `size` equal
    runs of rows.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.axes = tuple(a for a in plan.data_axes if a != TIME)
        self.size, self.index = 1, 0
        for axis in self.axes:
            n = plan.mesh.axis_size(axis)
            self.size *= n
            self.index = self.index * n + plan.mesh.coords(rank)[axis]

    def sampler(
        self,
        dataset: Dataset[Any],
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> DistributedSampler[Any]:
        """The samples of a dataset that this rank loads, for `DataLoader(sampler=)`."""
        return DistributedSampler(
            dataset, self.size, self.index, shuffle, seed, drop_last
        )

    def whole_like(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Something with the names, shapes and dtypes of the global batch of which
        `batch` is this rank's part; tensors hold zeros."""
        own = samples_of(batch)
        whole = dict(batch)
        for name, x in batch.items():
            if isinstance(x, Tensor):
                n = own * self.size if _has_samples(x, own) else None
                shape = x.shape if n is None else (n, *x.shape[1:])
                whole[name] = torch.zeros(shape, dtype=x.dtype)
        return whole

    def gather(self, comm: Comm, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The global batch, of what each rank loaded; on all ranks."""
        own = samples_of(parts)
        whole = dict(parts)
        for name, x in parts.items():
            if _has_samples(x, own) and self.size > 1:
                # As bytes: not every backend sends booleans, or integers of 16 bits.
                sent = x.contiguous().view(torch.uint8)
                whole[name] = comm.all_gather(sent, self.axes, 0).view(x.dtype)
        return whole


def _has_samples(x: Tensor, samples: int) -> bool:
    return x.ndim > 0 and len(x) == samples
