"""Batches of which each rank has loaded its own samples only.

Ranks that the batch is split over load different samples, and those that differ in
another axis alone (tp, pp, cp) the same. A step computes as on the global batch of
them: labels are counted over ranks, and masks of dropout drawn as if every rank had it.
What a rank does not read stays away from its device.
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
from autopar.passes.shard.layout import extent
from autopar.runtime.agreement.roll_call import NO_MORE, RollCall, ranks_text
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.own_rows import Field, OwnRows
from autopar.runtime.execute.executor import Executor

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

    def fields(
        self, executor: Executor, batch: Mapping[str, Tensor], local: bool
    ) -> dict[str, Field]:
        """What the stages of this rank read of a batch, on their device. Rows of others
        come there only of fields that are read whole, as sums over several fields read
        them, and of local batches where `exchange` does not do.

        local: `batch` is this rank's part.
        """
        comm, axes = executor.comm, executor.program.plan.data_axes
        comm.state = executor.state  # another executor may have run before
        samples = fields_of_samples(batch, executor.program.inputs) if local else ()
        parts = self.size if self.size > 1 else 0
        fields: dict[str, Field] = {}
        # In one order, in whichever a rank names them.
        for name in sorted(executor.reads):
            x, is_part = batch[name], parts and name in samples
            by_rows = parts and executor.reads[name]
            if by_rows and not is_part:
                fields[name] = own_rows(comm, x, axes)
            elif by_rows and self._exchanges(comm.state.microbatches):
                fields[name] = self.exchange(comm, upload(x, comm.device), axes)
            else:
                x = upload(x, comm.device)
                fields[name] = self.gather(comm, x) if is_part else x
        return fields

    def _exchanges(self, microbatches: int) -> bool:
        """Whether each rank has loaded as many rows of every other one."""
        alike = len(self.axes) == 1 and microbatches % self.size == 0
        return alike or microbatches == 1

    def exchange(self, comm: Comm, part: Tensor, axes: tuple[str, ...]) -> OwnRows:
        """My rows of what each rank loaded. A microbatch is a run of rows of the global
        batch, of which every rank computes a part, so that rows are exchanged."""
        times = comm.state.microbatches
        if times > 1:
            rows = part.contiguous().view(torch.uint8)  # as in `gather`
            rows = rows.view(times // self.size, self.size, -1).transpose(0, 1)
            rows = comm.all_to_all(rows, self.axes[0], 0, 1)
            part = rows.view(-1).view(part.dtype).view(part.shape)
        return OwnRows(part.chunk(times), axes)

    def gather(self, comm: Comm, part: Tensor) -> Tensor:
        """A field of the global batch, of what each rank loaded; on all ranks."""
        # As bytes: not every backend sends booleans, or integers of 16 bits.
        sent = part.contiguous().view(torch.uint8)
        return comm.all_gather(sent, self.axes, 0).view(part.dtype)


def own_rows(comm: Comm, x: Tensor, axes: tuple[str, ...]) -> OwnRows:
    """The rows of x [samples, ...] that a rank computes with, on its device."""
    times = range(comm.state.microbatches if TIME in axes else 1)
    shares = [comm.pieces(len(x), axes, {TIME: i}) for i in times]
    rows = [x.narrow(0, *piece) for share in shares for piece in share]
    mine = upload(torch.cat([x[:0], *rows]), comm.device)
    return OwnRows(mine.split([extent(share) for share in shares]), axes)


def upload(x: Tensor, device: torch.device) -> Tensor:
    """x on a device. A GPU takes it when it comes to it: the host does not wait."""
    ahead = device.type == "cuda" and x.device.type == "cpu"
    return (x.pin_memory() if ahead else x).to(device, non_blocking=ahead)


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
    shared = islice(loader, fewest)
    while True:
        try:
            batch = next(shared)
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
