"""gradient_buckets: a rank's gradients in flat buffers, reduced over ranks as such."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from autopar.passes.program import Program
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.work import Work

LOG = logging.getLogger("autopar")
# Bytes of gradients that are worth a message, over NCCL and over gloo (Li 2020,
# arXiv:2006.15704, figure 7); between these a fourth of all, so that the first leave
# while the backward still runs.
MOST, LEAST, MESSAGES = 25 << 20, 5 << 20, 4
# In bytes, where gradients begin: how a product is rounded that is added to memory may
# depend on it, and what lies before a gradient has other sizes on other ranks.
ALIGNED = 64


@dataclass
class Bucket:
    """Gradients that are reduced together: views into one flat buffer.

    ranks: those over whose values the buffer is a pending sum (this one included).
    names: of parameters. tensors: names of what stages add to.
    told: (stage, id of a gradient), for each that a stage says is ready; none: they are
    reduced after the last action. missing: those still to come. reducing: what is under
    way.
    """

    ranks: tuple[int, ...]
    flat: Tensor
    names: list[str]
    tensors: list[str]
    told: frozenset[tuple[int, int]]
    missing: set[tuple[int, int]] = field(default_factory=set)
    reducing: Work | None = None


class Gradients:
    """The gradients of a rank's parameters that are trained.

    by_name: of each, see `Program.parameters`. tensors: where the emitted modules add
    to each, see `Program.tensors`. buckets: what is reduced together, as soon as all of
    it is ready. like: those of another program with the same parameters, to share the
    memory of; what they are reduced over is each program's.
    """

    def __init__(
        self,
        program: Program,
        comm: Comm,
        parameters: Mapping[str, nn.Parameter],
        like: Gradients | None = None,
    ) -> None:
        self.program, self.comm, self.parameters = program, comm, parameters
        self.by_name: dict[str, Tensor] = {} if like is None else like.by_name
        self.tensors: dict[str, Tensor] = {} if like is None else like.tensors
        self.buckets: list[Bucket] = (
            self._make_buckets()
            if like is None
            else [self._reduced_here(bucket) for bucket in like.buckets]
        )
        self._bucket_of = {
            id(self.tensors[name]): bucket
            for bucket in self.buckets
            for name in bucket.tensors
        }
        # What the user wants added to, by bucket that was cleared; None: zeros.
        self._before: dict[int, Tensor | None] = {}
        # The same, of the last step, whose gradients were added to it.
        self._added: dict[int, Tensor | None] = {}

    # --- the buffers ---------------------------------------------------------------

    def _make_buckets(self) -> list[Bucket]:
        """Lay out gradients that are reduced over the same ranks in one buffer; of
        those that a stage says are ready, in some, the last layers' first."""
        members: dict[Any, list[str]] = defaultdict(list)
        mine = self.program.stages_of(self.comm.rank)
        for name, spec in reversed([*self.program.tensors.items()]):
            p = next(iter(self._rows(name)), None)
            if p is None or not p.requires_grad:
                continue
            first = self.program.rows_of(name)[0]
            ranks = self.program.gradient_ranks(first, self.comm.rank)
            within = len({*map(self.program.mesh.pipeline_rank, ranks)}) == 1
            stages = spec.stages if within else ()
            ready = tuple(s for s in stages if s in mine) if len(ranks) > 1 else ()
            members[ranks, str(p.dtype), ready].append(name)
        buckets = []
        for (ranks, _, ready), names in sorted(members.items()):
            for own in self._parts(names) if ready else [names[::-1]]:
                buckets.append(self._bucket(ranks, own, ready))
        return buckets

    def _rows(self, name: str) -> list[nn.Parameter]:
        """The parameters here that are stacked in a tensor, or it alone."""
        rows = self.program.rows_of(name)
        return [self.parameters[row] for row in rows if row in self.parameters]

    def _reduced_here(self, bucket: Bucket) -> Bucket:
        """Another program's bucket, reduced as this program wants it: not at all, where
        ranks that shared a batch then compute all of it now."""
        ranks = {self.program.gradient_ranks(n, self.comm.rank) for n in bucket.names}
        assert len(ranks) == 1, "gradients of a bucket are reduced together"
        [ranks_of_all] = ranks
        told = bucket.told if len(ranks_of_all) > 1 else frozenset[tuple[int, int]]()
        return Bucket(ranks_of_all, bucket.flat, bucket.names, bucket.tensors, told)

    def _parts(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Neighbours of some size each, the same on all ranks of a stage."""
        sizes = {name: self._bytes(name) for name in names}
        enough = min(MOST, max(LEAST, sum(sizes.values()) // MESSAGES))
        bucket: list[str] = []
        size = 0
        for name in names:
            bucket.append(name)
            size += sizes[name]
            if size >= enough:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

    def _bytes(self, name: str) -> int:
        """Bytes of a rank's gradient, as if shares were even."""
        spec = self.program.tensors[name]
        parts = prod(self.program.mesh.axis_size(a) for a in spec.split_axes)
        return prod(spec.shape) * self._rows(name)[0].itemsize // parts

    def _bucket(
        self, ranks: tuple[int, ...], names: list[str], stages: Sequence[int]
    ) -> Bucket:
        first = self._rows(names[0])[0]
        counts = [sum(p.numel() for p in self._rows(n)) for n in names]
        unit = ALIGNED // first.itemsize
        rooms = [-(-count // unit) * unit for count in counts]
        flat = torch.zeros(sum(rooms), dtype=first.dtype, device=first.device)
        held = []
        for n, count, room in zip(names, counts, flat.split(rooms), strict=True):
            rows = [row for row in self.program.rows_of(n) if row in self.parameters]
            shape, whole = self.parameters[rows[0]].shape, room[:count]
            if rows == [n]:
                self.tensors[n] = self.by_name[n] = whole.view(shape)
            else:
                self.tensors[n] = whole.view(len(rows), *shape)
                self.by_name.update(zip(rows, self.tensors[n], strict=True))
            held += rows
        told = frozenset((s, id(self.tensors[n])) for s in stages for n in names)
        return Bucket(ranks, flat, held, names, told)

    # --- one step ------------------------------------------------------------------

    def begin(self) -> None:
        """Clear the buffers; what the user wants added to is kept aside."""
        self.keep()
        self._before.clear()
        for i, bucket in enumerate(self.buckets):
            self._end_reduction(bucket)  # of a step that failed
            held = []
            for n in bucket.names:
                p = self.parameters[n]
                if p.requires_grad and p.grad is not None:
                    held.append(n)
                elif p.grad is not None and p.grad.is_set_to(self.by_name[n]):
                    p.grad = self.by_name[n].clone()  # frozen since: it stays as it is
            self._before[i] = self._set_aside(bucket, held) if held else None
            if not held and self._is_kept(bucket):
                self._renew(bucket)
            else:
                bucket.flat.zero_()
            bucket.missing = set(bucket.told)

    def _set_aside(self, bucket: Bucket, held: Sequence[str]) -> Tensor | None:
        """A bucket's gradients as the user has them, None if they are all 0."""
        for n in set(bucket.names) - set(held):
            self.by_name[n].zero_()
        for n in held:
            grad = self.parameters[n].grad
            assert grad is not None
            if grad.data_ptr() != self.by_name[n].data_ptr():
                self.by_name[n].copy_(grad)
        return bucket.flat.clone() if bool(bucket.flat.any()) else None

    def _views(self, bucket: Bucket) -> list[Tensor]:
        """The tensors here that share a bucket's memory."""
        stacked = [self.tensors[n] for n in bucket.tensors]
        rows = [self.by_name[n] for n in bucket.names]
        return [*{id(x): x for x in (bucket.flat, *stacked, *rows)}.values()]

    def _is_kept(self, bucket: Bucket) -> bool:
        """Whether a loop that has set its gradients to None keeps tensors of as many,
        as averages of gradients begin with them."""
        storage = bucket.flat.untyped_storage()
        users = torch._C._storage_Use_Count(storage._cdata) - 1  # without `storage`
        return users - len(self._views(bucket)) >= len(bucket.names)

    def _renew(self, bucket: Bucket) -> None:
        """Gives a bucket memory of its own, as autograd gives new gradients theirs."""
        flat, start = torch.zeros_like(bucket.flat), bucket.flat.storage_offset()
        for x in self._views(bucket):
            x.data = flat.as_strided(x.shape, x.stride(), x.storage_offset() - start)

    def ready(self, stage: int, gradients: Sequence[Tensor]) -> None:
        """A stage will not add to them any more in this step."""
        for grad in gradients:
            bucket = self._bucket_of.get(id(grad))
            if bucket is not None and bucket.told:
                bucket.missing.remove((stage, id(grad)))
                if not bucket.missing:
                    self._start_reduction(bucket)

    def _start_reduction(self, bucket: Bucket) -> None:
        reducing = self.comm.start_reduce_ranks_(bucket.flat, bucket.ranks)
        bucket.reducing = reducing

    def end_reductions(self) -> None:
        """Wait for gradients that are under way, and reduce those of several stages."""
        for bucket in self.buckets:
            if len(bucket.ranks) > 1 and not bucket.told:
                self._start_reduction(bucket)
        for bucket in self.buckets:
            assert bucket.reducing or len(bucket.ranks) == 1, "all gradients are ready"
            self._end_reduction(bucket)

    def _end_reduction(self, bucket: Bucket) -> None:
        if bucket.reducing:
            bucket.reducing.wait()
            bucket.reducing = None

    def put_back(self) -> None:
        """Restores the gradients from before a step that failed. Where a sum over ranks
        is under way, other ranks may wait as well: it ends in the next step."""
        for i, old in self._before.items():
            flat = self.buckets[i].flat
            flat.zero_() if old is None else flat.copy_(old)
        self._before.clear()

    def hand_over(self, overflowed: bool = False) -> None:
        """Puts gradients into the parameters' `.grad`; None if they overflowed, with a
        warning where others of the same update are lost with them."""
        held = any(old is not None for old in self._before.values())
        if overflowed and held and self.comm.rank == 0:
            LOG.warning(
                "gradients overflowed that were to be added to others: those are gone "
                "too, and what is added until zero_grad() is a part of an update; "
                "compile with microbatches=..., and pass all at once, or leave the "
                "update out where step.skipped has grown"
            )
        for i, old in self._before.items():
            if old is not None:
                self.buckets[i].flat.add_(old)
        self._added, self._before = self._before, {}
        self._show(overflowed)

    @property
    def are_alone(self) -> bool:
        """Whether those of the last step were added to none."""
        return all(old is None for old in self._added.values())

    def multiply(self, factor: Tensor | None, cleared: Set[str]) -> None:
        """Makes of the gradients that the last step has added a multiple of them, until
        `keep` is called. factor: [], None for 1. cleared: names of those that have not
        what was there before any more."""
        for i, old in self._added.items():
            bucket = self.buckets[i]
            if old is not None:
                bucket.flat.sub_(old)
            if factor is not None:
                bucket.flat.mul_(factor)
            if old is not None:
                for name in cleared & {*bucket.names}:
                    own = self.by_name[name]
                    place = own.storage_offset() - bucket.flat.storage_offset()
                    old[place : place + own.numel()].zero_()
                bucket.flat.add_(old)
        self._show()

    def keep(self) -> None:
        """Forgets what the gradients of the last step were added to."""
        self._added = {}

    def _show(self, overflowed: bool = False) -> None:
        for name, grad in self.by_name.items():
            if (p := self.parameters[name]).requires_grad:
                p.grad = None if overflowed else grad


def rest_otherwise(own: Program, before: Program) -> list[str]:
    """The parameters that two programs hold otherwise, or whose gradients are in one
    buffer of the first and reduced over different ranks by the second. What their dims
    are called tells nothing: the size of a batch may decide that."""
    axes: dict[Any, Any] = {}  # of reductions: before -> now
    differ = []
    for name, was in before.parameters.items():
        now = own.parameters.get(name)
        if now is None or replace(now, pending=was.pending, dims=was.dims) != was:
            differ.append(name)
        elif was.trainable:
            now_over = own.gradient_axes(now)
            if axes.setdefault(before.gradient_axes(was), now_over) != now_over:
                differ.append(name)
    return differ + [n for n in own.parameters if n not in before.parameters]
