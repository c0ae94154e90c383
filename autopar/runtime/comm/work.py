"""Handles of tensors that are on their way, and how many there were."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


class Work(ABC):
    """A transfer on its way. `wait` returns the tensor, once it is here (or gone)."""

    @abstractmethod
    def wait(self) -> Tensor: ...


@dataclass
class Traffic:
    """How often this rank made a call, and how many bytes it brought into it."""

    calls: int = 0
    bytes: int = 0


class Meeting:
    """Integers of all ranks, by rank; here already."""

    def __init__(self, result: list[list[int]]) -> None:
        self._result = result

    def rows(self) -> list[list[int]]:
        """Wait for them. Raises: CommError if a rank is gone."""
        return self._result

    def rows_soon(self) -> list[list[int]] | None:
        """The same, unless they are not there in a second; raises nothing."""
        return self._result


@dataclass(frozen=True)
class CoalescedWork:
    """Several tensors on their way in one message."""

    work: Work
    unpack: Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Arrived(Work):
    """A message that needs no transfer."""

    x: Tensor

    def wait(self) -> Tensor:
        return self.x


@dataclass(frozen=True)
class Summed(Work):
    """The sum, in rank order, of rows that arrive one after the other in a buffer."""

    work: Work
    ranks: int

    def wait(self) -> Tensor:
        rows = self.work.wait()
        total = sum_in_order(rows.view(self.ranks, len(rows) // self.ranks).unbind(0))
        free_storage(rows)
        return total


def free_storage(x: Tensor) -> None:
    """Free the memory of x, which nobody may read any more.

    A thread of gloo's keeps a message's tensors until it runs again, and that may be
    long after the wait for it: buffers of several messages would be there at once.
    """
    x.untyped_storage().resize_(0)


def sum_in_order(rows: Sequence[Tensor]) -> Tensor:
    """A new tensor: the sum of two rows [...] or more, added first to last.

    A loop, because torch.sum over a dim may add in another order.
    """
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total += row
    return total
