"""The virtual mesh: all ranks in one process, one at a time, in an order that repeats.

Each rank is a thread that runs until it has to wait for another one. A collective
happens when the last of its ranks arrives, and only if all make the same call; when no
rank can go on, that is a deadlock, found at once. Values are computed as on process
groups, with sums in rank order.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.passes.mesh import Mesh
from autopar.runtime.comm.comm import Comm, CommError
from autopar.runtime.comm.scheduler import Stopped
from autopar.runtime.comm.virtual_world import Joined, Message, Reducing, World
from autopar.runtime.comm.work import Arrived, Call, Work, sum_in_order

T = TypeVar("T")


class RankError(CommError):
    """A rank raised an exception, which is the `__cause__` of this one."""


def run_virtual(
    mesh: Mesh,
    microbatches: int,
    body: Callable[[Comm], T],
    device: torch.device | None = None,
) -> list[T]:
    """Run body(comm) once for each rank of the mesh; give what they return, by rank.

    Grad mode is that of the caller, and kernels use one CPU thread.
    Raises: RankError, Deadlock, Mismatch; no rank is left running.
    """
    world = World(mesh)
    comms = [
        VirtualComm(world, rank, microbatches, device or torch.device("cpu"))
        for rank in range(mesh.size)
    ]
    results: dict[int, T] = {}
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()

    def run_rank(rank: int) -> None:
        torch.set_num_threads(1)  # a setting of the thread, as grad mode is
        try:
            with torch.set_grad_enabled(grad):
                results[rank] = body(comms[rank])
        except Stopped:
            raise
        except BaseException as cause:
            message = f"{world.name(rank)}: {type(cause).__name__}: {cause}"
            error = RankError(message)
            error.__cause__ = cause
            world.scheduler.stop(error)

    try:
        world.scheduler.run(run_rank)
    finally:
        torch.set_num_threads(threads)
    world.check_messages()
    return [results[rank] for rank in range(mesh.size)]


class VirtualComm(Comm):
    """One rank's end of a virtual mesh; `run_virtual` makes them."""

    def __init__(
        self, world: World, rank: int, microbatches: int, device: torch.device
    ) -> None:
        super().__init__(world.mesh, rank, microbatches, device)
        self._world = world
        self._call = Call("")
        self._sends: list[Message] = []

    def flush(self) -> None:
        for message in self._sends:
            message.wait()
        self._sends.clear()

    def gather_object(self, value: Any) -> list[Any]:
        return [pickle.loads(one) for one in self._gather_pickled(value)]

    def gather_to_first(self, value: Any) -> list[Any]:
        pickled = self._gather_pickled(value)
        return [pickle.loads(one) for one in pickled] if self.rank == 0 else []

    def _gather_pickled(self, value: Any) -> list[bytes]:
        """Gathers pickled values: ranks share nothing mutable, as between processes."""
        self._call = Call("gather_object")
        return self._meet(
            self.everyone, pickle.dumps(value), lambda values: [values] * len(values)
        )

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        self._call = Call("broadcast_object", detail={"source": source})
        pickled = self._meet(
            self.everyone,
            pickle.dumps(value) if self.rank == source else None,
            lambda values: [values[source]] * len(values),
        )
        return pickle.loads(pickled)

    def _start_reduce_(self, x: Tensor, ranks: tuple[int, ...], op: str) -> Work:
        def reduce(rows: list[Tensor]) -> list[Tensor]:
            summed = op == "sum"
            total = sum_in_order(rows) if summed else torch.stack(rows).amax(0)
            return [total] * len(rows)  # to be read only

        return Reducing(self._join(ranks, x, reduce), x)

    def _start_gather(self, rows: Tensor, ranks: tuple[int, ...]) -> Work:
        return self._join(ranks, rows[ranks.index(self.rank)], _stacked)

    def _start_exchange(
        self, x: Tensor, sent: list[int], counts: list[int], ranks: tuple[int, ...]
    ) -> Work:
        return self._join(ranks, x.split(sent), _exchanged)

    def _shift(self, x: Tensor, ranks: tuple[int, ...], numel: int) -> Work:
        def shift(rows: list[Tensor]) -> list[Tensor]:
            return [row.clone() for row in (rows[-1], *rows[:-1])]

        arrived = self._meet(ranks, x, shift)
        if arrived.numel() != numel:
            raise CommError(f"a shift brings {arrived.numel()} elements, not {numel}")
        return Arrived(arrived)

    def _send(self, x: Tensor, to_rank: int, tag: int) -> Work:
        self._sends = [sent for sent in self._sends if not sent.done]
        message = Message(self._world, True, self.rank, to_rank, tag, x)
        self._sends.append(message)
        self._world.post(message)
        return message

    def _recv(self, x: Tensor, from_rank: int, tag: int) -> Work:
        message = Message(self._world, False, self.rank, from_rank, tag, x)
        self._world.post(message)
        return message

    def _announce(self, call: Call) -> None:
        self._call = call

    def _meet(
        self,
        ranks: tuple[int, ...],
        value: Any,
        compute: Callable[[list[Any]], list[Any]],
    ) -> Any:
        return self._join(ranks, value, compute).wait()

    def _join(
        self,
        ranks: tuple[int, ...],
        value: Any,
        compute: Callable[[list[Any]], list[Any]],
    ) -> Joined:
        return self._world.join(self.rank, ranks, self._call, value, compute)


def _stacked(shards: list[Tensor]) -> list[Tensor]:
    """The result of a gather on each rank."""
    return [torch.stack(shards) for _ in shards]


def _exchanged(rows: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """The parts for each rank, where each brings parts for all."""
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]
