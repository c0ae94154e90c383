"""Calls that ranks make together, and handles of tensors that are on their way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.passes.graph_text import type_text


class Work(ABC):
    """A transfer on its way. `wait` returns the tensor, once it is here (or gone)."""

    @abstractmethod
    def wait(self) -> Tensor: ...


@dataclass(frozen=True)
class Call:
    """A collective as one rank calls it."""

    kind: str
    axes: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    open_dim: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    def common(self) -> tuple[Any, ...]:
        """The fields that must be equal on all ranks that meet."""
        shape: list[int | None] = list(self.shape)
        if self.open_dim is not None:
            shape[self.open_dim] = None
        detail = self.detail.items()
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in detail}
        return self.kind, self.dtype, shape, plain

    def __str__(self) -> str:
        words = [] if self.dtype is None else [type_text(self.shape, self.dtype)]
        words += ["+".join(self.axes)] if self.axes else []
        words += [f"{k}={v}" for k, v in self.detail.items() if v is not None]
        return f"{self.kind}({', '.join(words)})"


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
