"""The engine of ranks whose tensors are on GPUs and that talk by gloo.

NCCL wants a GPU for each rank. Ranks that share one, as in a test of a plan on a single
GPU, talk through the host's memory: slowly, and the device is waited for each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.comm.process_groups import ProcessComm
from autopar.runtime.comm.work import Work


def engine(device: torch.device) -> type[ProcessComm]:
    """The class that carries tensors of a device between this run's processes."""
    if device.type == "cpu" or not dist.is_initialized():
        return ProcessComm
    by_gloo = f"{device.type}:gloo" in dist.get_backend_config()
    return HostComm if by_gloo else ProcessComm


@dataclass(frozen=True)
class Landing(Work):
    """A transfer to the host, which goes on to where it is needed."""

    work: Work
    x: Tensor

    def wait(self) -> Tensor:
        return self.x.copy_(self.work.wait())


class HostComm(ProcessComm):
    """A `ProcessComm` that moves tensors through the host."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, in_turn=False)  # gloo has tags

    def _start_reduce_(self, x: Tensor, ranks: tuple[int, ...], op: str) -> Work:
        return Landing(super()._start_reduce_(_copied(x), ranks, op), x)

    def _shift(self, x: Tensor, ranks: tuple[int, ...], numel: int) -> Work:
        return Landing(super()._shift(_copied(x), ranks, numel), x.new_empty(numel))

    def _start_gather(self, rows: Tensor, ranks: tuple[int, ...]) -> Work:
        return Landing(super()._start_gather(_copied(rows), ranks), rows)

    def _start_exchange(
        self, x: Tensor, sent: list[int], counts: list[int], ranks: tuple[int, ...]
    ) -> Work:
        moved = super()._start_exchange(_copied(x), sent, counts, ranks)
        return Landing(moved, x.new_empty(sum(counts)))

    def _by_exchange(self, x: Tensor, counts: list[int]) -> bool:
        return True

    def _send(self, x: Tensor, to_rank: int, tag: int) -> Work:
        return super()._send(_copied(x), to_rank, tag)

    def _recv(self, x: Tensor, from_rank: int, tag: int) -> Work:
        return Landing(super()._recv(_copied(x), from_rank, tag), x)


def _copied(x: Tensor) -> Tensor:
    """A copy on the host, once the device has made x."""
    return torch.empty_like(x, device="cpu").copy_(x)
