"""Communication between ranks: the calls of emitted code, whatever carries them.

A `Comm` adds messages between two ranks, and Python objects of all, to the calls of
`Collectives` and `Routing`. Engines carry them: process groups in
`autopar.runtime.comm.process_groups`, the virtual mesh in
`autopar.runtime.comm.virtual`; so both run the same arithmetic.

A Comm moves values: call it without autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.comm.expert_routing import Routing
from autopar.runtime.comm.work import Meeting, Work

Outgoing = tuple[Tensor, int, int]  # a tensor, to which rank, its tag
Incoming = tuple[Sequence[int], torch.dtype, int, int]  # its shape; from which rank


class CommError(RuntimeError):
    """Ranks that do not fit together: a missing group, a mismatch, a deadlock."""


class Comm(Routing, ABC):
    """One rank's end of every communication.

    in_turn: whether messages begin in the one order of `passes.schedule.exchanges`.
    """

    in_turn = False

    def ready(self, gradients: Sequence[Tensor]) -> None:
        """Tells that this microbatch adds no more to some gradients."""
        if self.state.on_ready is not None:
            self.state.on_ready(gradients)

    def loss_scale(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The factor that a backward starts with, and its gradients have until its
        end."""
        return torch.full(
            tuple(shape), self.state.scale, dtype=dtype, device=self.device
        )

    # Messages. The k-th send to a rank meets the k-th recv posted there for this one,
    # and their tags must agree.

    def send(self, x: Tensor, to_rank: int, tag: int) -> Work:
        """Start sending x [...], which must not change before its wait or a flush."""
        self._peer("send", to_rank, x)
        return self._send(x.contiguous(), to_rank, tag)

    def recv(
        self, shape: Sequence[int], dtype: torch.dtype, from_rank: int, tag: int
    ) -> Work:
        """Be ready for a tensor; post it early, and wait when the value is needed."""
        x = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self._peer("recv", from_rank, x)
        return self._recv(x, from_rank, tag)

    def exchange(
        self, sends: Sequence[Outgoing], receives: Sequence[Incoming]
    ) -> tuple[list[Work], list[Work]]:
        """Begin several of both, see `send` and `recv`; what begins together on one
        rank begins together on the others."""
        coming = [self.recv(*one) for one in receives]
        return [self.send(*one) for one in sends], coming

    @abstractmethod
    def flush(self) -> None:
        """Wait until all that was sent has left."""

    @abstractmethod
    def gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. All ranks must call it."""

    def gather_to_first(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on rank 0, which alone needs them."""
        return self.gather_object(value)

    @abstractmethod
    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source`, on every rank. All ranks must call it."""

    def start_meet(self, numbers: Sequence[int], operation: str) -> Meeting:
        """Begin to gather a few integers of each rank, first in an operation."""
        return Meeting(self.gather_object(list(numbers)))

    def open_groups(self, wanted: Iterable[tuple[int, ...]]) -> None:
        """Prepare for collectives of these ranks (ascending); on all ranks."""

    def abandon(self) -> None:
        """Let ranks that wait for this one fail, where they would not by themselves."""

    @abstractmethod
    def _send(self, x: Tensor, to_rank: int, tag: int) -> Work: ...

    @abstractmethod
    def _recv(self, x: Tensor, from_rank: int, tag: int) -> Work: ...

    def _peer(self, kind: str, rank: int, x: Tensor) -> None:
        """Count a message to or from a rank, which must be another one."""
        if rank == self.rank or not 0 <= rank < self.mesh.size:
            raise ValueError(
                f"rank {self.rank} cannot {kind} to or from rank {rank} "
                f"in mesh '{self.mesh}'"
            )
        traffic = self.log[kind, ()]
        traffic.calls += 1
        traffic.bytes += x.numel() * x.element_size()
