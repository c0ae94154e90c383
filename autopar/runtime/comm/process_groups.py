"""The engine of real runs: `torch.distributed` process groups, gloo or NCCL."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.passes.mesh import Mesh
from autopar.runtime.comm.comm import Comm, CommError, Incoming, Outgoing
from autopar.runtime.comm.point_to_point import Message, PointToPoint
from autopar.runtime.comm.work import Meeting, Work

# Renamed in torch 2.13, where the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
LATE = timedelta(seconds=30)  # a rank that waits so long says so
SOON = timedelta(seconds=1)
LOG = logging.getLogger("autopar")
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class ProcessComm(Comm):
    """Communication over the default process group and subgroups of it.

    Construct it on all ranks, with the same arguments, after `init_process_group`; a
    mesh of one rank needs none. It makes one process group for each set of ranks in
    `groups` (axes, as they are used) and in `rank_groups` (ascending ranks); and, where
    messages go `in_turn`, for those of each pipeline, whose collectives have their own.
    They belong to torch.distributed: `destroy_process_group` ends them, whoever still
    holds this.

    in_turn: whether messages between pipeline stages are calls of one communicator, in
    the order of `passes.schedule.exchanges`; None: where NCCL carries them. gloo tells
    messages apart by their tags, and each goes when it can.

    timeout: as given to `init_process_group`, which does not hand it on to subgroups.
    A rank that died, or one that is late by more than this, raises in the others.
    """

    def __init__(
        self,
        mesh: Mesh,
        microbatches: int = 1,
        *,
        groups: Iterable[tuple[str, ...]] = (),
        rank_groups: Iterable[tuple[int, ...]] = (),
        device: torch.device | None = None,
        timeout: timedelta | None = None,
        in_turn: bool | None = None,
    ) -> None:
        started = dist.is_initialized()
        world = dist.get_world_size() if started else 1
        if world != mesh.size:
            raise CommError(
                f"mesh '{mesh}' has {mesh.size} ranks, but {world} processes run"
                f"\n  fix  start {mesh.size} processes, as with "
                f"torchrun --nproc-per-node {mesh.size}, or with --nnodes N so many in "
                "all"
            )
        rank = dist.get_rank() if started else 0
        super().__init__(mesh, rank, microbatches, device or torch.device("cpu"))
        wanted = {ranks for axes in groups for ranks in mesh.groups(axes)}
        self._timeout = timeout
        self._groups = _new_groups(rank, world, wanted | set(rank_groups), timeout)
        self.in_turn = self.device.type != "cpu" if in_turn is None else in_turn
        self._point_to_point: PointToPoint | None = None
        if self.in_turn:
            self._point_to_point = PointToPoint(mesh, rank, self.device, timeout)
        self._sends: deque[_Transfer] = deque()
        # On the CPU, whatever carries tensors: nobody waits for a GPU to begin. Nothing
        # else goes through this group.
        call = dist.new_group(backend="gloo", timeout=timeout) if world > 1 else None
        self._roll_call = None if call is None else ref(call)

    def open_groups(self, wanted: Iterable[tuple[int, ...]]) -> None:
        """Make groups of ranks (ascending) that are not there yet; on all ranks."""
        world = self.mesh.size
        self._groups.update(_new_groups(self.rank, world, set(wanted), self._timeout))

    def flush(self) -> None:
        while self._sends:
            self._sends.popleft().wait()

    def gather_object(self, value: Any) -> list[Any]:
        if self.mesh.size == 1:
            return [value]
        values: list[Any] = [None] * self.mesh.size
        dist.all_gather_object(values, value)
        return values

    def gather_to_first(self, value: Any) -> list[Any]:
        if self.mesh.size == 1:
            return [value]
        values: list[Any] = [None] * self.mesh.size
        dist.gather_object(value, values if self.rank == 0 else None)
        return values

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        if self.mesh.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, source)
        return values[0]

    def start_meet(self, numbers: Sequence[int], operation: str) -> Meeting:
        group = self._roll_call and self._roll_call()
        if group is None:
            return super().start_meet(numbers, operation)
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        rows = mine.new_empty(self.mesh.size, len(numbers))
        work = _all_gather(rows.view(-1), mine, group, async_op=True)
        return _Meeting(work, rows, f"rank {self.rank}", f"step.{operation}()")

    def abandon(self) -> None:
        """Destroys gloo's groups, in which ranks wait; in NCCL's they go on."""
        if self.device.type == "cpu" and dist.is_initialized():
            dist.destroy_process_group()

    def _start_reduce_(self, x: Tensor, ranks: tuple[int, ...], op: str) -> Work:
        group = self._group(ranks)
        return _Transfer(dist.all_reduce(x, _REDUCE_OPS[op], group, async_op=True), x)

    def _shift(self, x: Tensor, ranks: tuple[int, ...], numel: int) -> Work:
        group, here = self._group(ranks), ranks.index(self.rank)
        out = x.new_empty(numel)
        after, before = ranks[(here + 1) % len(ranks)], ranks[here - 1]
        # Together: on NCCL two ranks that first send to each other would both wait.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, after, group),
                dist.P2POp(dist.irecv, out, before, group),
            ]
        )
        return _Shift(works, x, out)

    def _start_gather(self, rows: Tensor, ranks: tuple[int, ...]) -> Work:
        mine, group = rows[ranks.index(self.rank)], self._group(ranks)
        work = _all_gather(rows.view(-1), mine, group, async_op=True)
        return _Transfer(work, rows)

    def _start_exchange(
        self, x: Tensor, sent: list[int], counts: list[int], ranks: tuple[int, ...]
    ) -> Work:
        out, group = x.new_empty(sum(counts)), self._group(ranks)
        work = dist.all_to_all_single(out, x, counts, sent, group, async_op=True)
        return _Transfer(work, out)

    def _start_scatter_sum(
        self, x: Tensor, counts: list[int], ranks: tuple[int, ...]
    ) -> Work:
        if self._by_exchange(x, counts):
            return super()._start_scatter_sum(x, counts, ranks)
        out = x.new_empty(counts[0])
        work = _reduce_scatter(out, x, group=self._group(ranks), async_op=True)
        return _Transfer(work, out)

    def _by_exchange(self, x: Tensor, counts: list[int]) -> bool:
        """Whether to reduce-scatter by exchange: gloo's own is a whole all-reduce, and
        an exchange is faster and adds in rank order; NCCL's own needs even counts."""
        return x.device.type == "cpu" or min(counts) != max(counts)

    def exchange(
        self, sends: Sequence[Outgoing], receives: Sequence[Incoming]
    ) -> tuple[list[Work], list[Work]]:
        if self._point_to_point is None:
            return super().exchange(sends, receives)
        messages: list[Message] = []
        for x, peer, tag in sends:
            self._peer("send", peer, x)
            messages.append((dist.isend, x.contiguous(), peer, tag))
        for shape, dtype, peer, tag in receives:
            x = torch.empty(tuple(shape), dtype=dtype, device=self.device)
            self._peer("recv", peer, x)
            messages.append((dist.irecv, x, peer, tag))
        started = self._start(messages)
        leaving, coming = started[: len(sends)], started[len(sends) :]
        self._sends.extend(leaving)
        return [*leaving], [*coming]

    def _send(self, x: Tensor, to_rank: int, tag: int) -> Work:
        (transfer,) = self._start([(dist.isend, x, to_rank, tag)])
        self._sends.append(transfer)
        return transfer

    def _recv(self, x: Tensor, from_rank: int, tag: int) -> Work:
        (transfer,) = self._start([(dist.irecv, x, from_rank, tag)])
        return transfer

    def _start(self, messages: Sequence[Message]) -> list[_Transfer]:
        """Raises: CommError, if no communicator is for these."""
        self._free_storage()
        if self._point_to_point is None:
            return [_Transfer(call(x, to, tag=tag), x) for call, x, to, tag in messages]
        works = self._point_to_point.start(messages)
        if works is None:
            peers = sorted({peer for _, _, peer, _ in messages})
            raise CommError(
                f"rank {self.rank} has no process group for messages with ranks {peers}"
                "\n  fix  lay them along an axis pp of the mesh, and call "
                "destroy_process_group only at the end"
            )
        pairs = zip(works, messages, strict=True)
        return [_Transfer(work, message[1]) for work, message in pairs]

    def _free_storage(self) -> None:
        """Lets go of the tensors that were sent."""
        while self._sends and self._sends[0].done():
            self._sends.popleft()

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        try:
            return self._groups[ranks]
        except KeyError:
            raise CommError(
                f"rank {self.rank} has no process group for ranks {ranks}"
                f"\n  fix  name their axes in `groups`, or them in `rank_groups`, "
                f"and call destroy_process_group only at the end"
            ) from None


class _Meeting(Meeting):
    """Rows that `work` gathers from all ranks. who, where: for messages."""

    def __init__(self, work: dist.Work, rows: Tensor, who: str, where: str) -> None:
        self._work, self._rows = work, rows
        self._who, self._where = who, where
        self._began = time.monotonic()

    def rows(self) -> list[list[int]]:
        try:
            self._wait()
        except RuntimeError as error:
            raise CommError(
                f"{self._who} waits in {self._where} for a rank that failed, has "
                f"ended, or does not call it: {error}"
                f"\n  fix  call {self._where} on all ranks; if they do, see what the "
                "other one said"
            ) from error
        return self._rows.tolist()

    def _wait(self) -> None:
        try:
            self._work.wait(LATE)
        except RuntimeError:
            late = LATE.total_seconds()
            if time.monotonic() - self._began < late:
                raise
            LOG.warning(
                "%s has waited in %s for %.0f s: other ranks have called neither it "
                "nor anything else of the step",
                self._who, self._where, late,
            )  # fmt: skip
            self._work.wait()

    def rows_soon(self) -> list[list[int]] | None:
        try:
            self._work.wait(SOON)
        except RuntimeError:
            return None
        return self._rows.tolist()


class _Shift(Work):
    """A send and a receive at once; both tensors are kept until they are done."""

    def __init__(self, works: list[dist.Work], sent: Tensor, received: Tensor) -> None:
        self._works, self._received = works, received
        self._sent: Tensor | None = sent

    def wait(self) -> Tensor:
        while self._works:
            self._works.pop().wait()
        self._sent = None
        return self._received


class _Transfer(Work):
    """A message of torch.distributed; it keeps its tensors until it is done. x: the
    tensor that is received or sent."""

    def __init__(self, work: dist.Work, x: Tensor) -> None:
        self._work: dist.Work | None = work
        self._x = x

    def wait(self) -> Tensor:
        # Gloo's second wait for one send would never end.
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._x

    def done(self) -> bool:
        """Gloo knows only once it has been waited for."""
        return self._work is None or self._work.is_completed()


def _new_groups(
    rank: int, world: int, wanted: set[tuple[int, ...]], timeout: timedelta | None
) -> WeakValueDictionary[tuple[int, ...], dist.ProcessGroup]:
    """The groups that this rank is in; that of all ranks is the default one.

    Every rank takes part in making every group, in the same order: that is slower than
    `use_local_synchronization`, but no order of the calls can hang it.
    """
    groups: WeakValueDictionary[tuple[int, ...], dist.ProcessGroup]
    groups = WeakValueDictionary()
    for ranks in sorted(wanted):
        if list(ranks) != sorted(set(ranks)) or not set(ranks) <= set(range(world)):
            raise CommError(f"ranks {ranks} are not ascending ranks below {world}")
        if len(ranks) == world and world > 1:
            assert dist.group.WORLD is not None
            groups[ranks] = dist.group.WORLD
        elif len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                groups[ranks] = group
    return groups
