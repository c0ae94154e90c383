"""Batches of which each rank has loaded its own samples only.

Ranks that the batch is split over load different samples, and those that differ in
another axis alone (tp, pp, cp) the same. A step makes the global batch of them, so that
labels are counted, and masks of dropout drawn, as if every rank had it: of tokens that
is 16 bytes each, where a token's activations are thousands in every layer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.passes.errors import AutoparError
from autopar.passes.mesh import TIME
from autopar.passes.plan import Plan
from autopar.runtime.agreement.roll_call import NO_MORE, RollCall, ranks_text
from autopar.runtime.comm.comm import Comm

Batch = TypeVar("Batch")
LOG = logging.getLogger("autopar")
Inputs = Mapping[str, tuple[tuple[int, ...], str]]
NOTHING: Inputs = MappingProxyType({})


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

    def whole_like(
        self, batch: Mapping[str, Any], inputs: Inputs = NOTHING
    ) -> dict[str, Any]:
        """Something with the names, shapes and dtypes of the global batch of which
        `batch` is this rank's part; tensors hold zeros. inputs: of a program for such
        batches, which tells what of them are samples."""
        samples = fields_of_samples(batch, inputs)
        whole = dict(batch)
        for name, x in batch.items():
            if isinstance(x, Tensor):
                rows = [len(x) * self.size] if name in samples else x.shape[:1]
                whole[name] = torch.zeros((*rows, *x.shape[1:]), dtype=x.dtype)
        return whole

    def gather(
        self, comm: Comm, parts: Mapping[str, Tensor], inputs: Inputs = NOTHING
    ) -> dict[str, Tensor]:
        """The global batch, of what each rank loaded; on all ranks."""
        whole = dict(parts)
        # In one order, in whichever a rank names them.
        for name in sorted(fields_of_samples(parts, inputs)) if self.size > 1 else ():
            # As bytes: not every backend sends booleans, or integers of 16 bits.
            sent = parts[name].contiguous().view(torch.uint8)
            gathered = comm.all_gather(sent, self.axes, 0)
            whole[name] = gathered.view(parts[name].dtype)
        return whole


def batches(roll: RollCall, loader: Iterable[Batch]) -> Iterator[Batch]:
    """A loader's batches, see `RankStep.batches`.

    Ranks tell their loaders' lengths once, and at the end that there are no more: in
    between nobody waits. A rank that ends before says so to those that step.
    """
    roll("batches")
    lengths = roll.comm.gather_object(_length(loader))
    known = [length for length in lengths if length is not None]
    fewest = min(known) if len(known) == len(lengths) else None
    if fewest is not None and fewest < max(known) and roll.comm.rank == 0:
        LOG.warning(
            "%s: %d batches, others up to %d; all stop after %d",
            ranks_text([r for r, n in enumerate(lengths) if n == fewest]),
            fewest,
            max(known),
            fewest,
        )
    found = islice(loader, fewest)
    while True:
        try:
            batch = next(found)
        except StopIteration:
            break
        except Exception as error:  # of a dataset: the others must not wait for it
            told = f"its loader raised {type(error).__name__}: {error}"
            roll.refuse("step", AutoparError(told, fix="see what that rank said"))
            raise
        yield batch
    roll(NO_MORE)


def _length(loader: Iterable[Any]) -> int | None:
    """Returns that of a loader; None where it has none, as of an iterable dataset."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None


def fields_of_samples(batch: Mapping[str, Any], inputs: Inputs = NOTHING) -> list[str]:
    """The fields of a batch whose first dim is that of samples: the one that most have.
    Positions may be as many as a rank's samples, so that a program tells more."""
    shapes = {n: tuple(x.shape) for n, x in batch.items() if isinstance(x, Tensor)}
    if shapes.keys() <= inputs.keys():
        shapes = {name: inputs[name][0] for name in shapes}
    lengths = [shape[0] for shape in shapes.values() if shape]
    most = max(lengths, key=lengths.count, default=1)
    return [name for name, shape in shapes.items() if shape and shape[0] == most]
