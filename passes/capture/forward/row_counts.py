"""Numbers that are known only when a program runs, as Python compares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..forward.user_frames import asked_by_user

if TYPE_CHECKING:
    from ..forward.guards import Guards


class Truth(torch.SymBool):
    """Whether a number that is not known is other than 0."""

    def __init__(self, guards: Guards, x: Tensor, unknown: torch.SymBool) -> None:
        super().__init__(unknown.node)
        self.guards, self.x = guards, x

    def __bool__(self) -> bool:
        return self.guards.answer(self.x)


class Equality(torch.SymBool):
    """Whether two numbers, one of them unknown, are equal, or differ."""

    def __init__(self, guards: Guards, unknown: torch.SymBool, differ: bool) -> None:
        super().__init__(unknown.node)
        self.guards, self.differ = guards, differ

    def __bool__(self) -> bool:
        if self.node.maybe_as_bool() is not None or not asked_by_user(__file__):
            return super().__bool__()
        return self.guards.is_equal() != self.differ


class RowTotal(torch.SymInt):
    """A sum of numbers of rows, also with other numbers: it may be checked."""

    def __init__(self, guards: Guards, unknown: torch.SymInt) -> None:
        super().__init__(unknown.node)
        self.guards = guards

    def _made(self, unknown: Any) -> Any:
        known = not isinstance(unknown, torch.SymInt)
        return unknown if known else RowTotal(self.guards, unknown)

    def _compared(self, unknown: Any, differ: bool) -> Any:
        known = not isinstance(unknown, torch.SymBool)
        return unknown if known else Equality(self.guards, unknown, differ)

    def __add__(self, other: Any) -> Any:
        return self._made(super().__add__(other))

    def __radd__(self, other: Any) -> Any:
        return self._made(super().__radd__(other))

    def __eq__(self, other: object) -> Any:
        return self._compared(super().__eq__(other), differ=False)

    def __ne__(self, other: object) -> Any:
        return self._compared(super().__ne__(other), differ=True)

    def __hash__(self) -> int:
        return super().__hash__()


class RowCount(RowTotal):
    """A number of rows that the data choose, or one in a tensor: it may be compared
    with 0, or be an unknown number. x: the rows, or where the number is."""

    def __init__(
        self, guards: Guards, x: Tensor, unknown: torch.SymInt, rows: str = ""
    ) -> None:
        super().__init__(guards, unknown)
        self.x, self.rows = x, rows

    def __bool__(self) -> bool:
        return self.guards.answer(self.x, self.rows)

    def _is_positive(self) -> bool:
        alone = bool(self.rows) or self.x.dtype == torch.bool
        return bool(self) if alone else self.guards.answer(self.x > 0, of=self.x)

    def _is_above(self, limit: Any, usual: Callable[[Any], Any]) -> Any:
        if is_number(limit, 0):
            return self._is_positive()
        if self.rows and type(limit) is int and limit > 0:
            return self.guards.is_above(self.node.expr, limit)
        if not self.rows and type(limit) is int:
            return self.guards.answer(self.x > limit)
        return usual(limit)

    def __gt__(self, other: Any) -> Any:
        return self._is_above(other, super().__gt__)

    def __ge__(self, other: Any) -> Any:
        least = other - 1 if type(other) is int else other
        return self._is_above(least, lambda _: super(RowCount, self).__ge__(other))

    def __lt__(self, other: Any) -> Any:
        least = other - 1 if type(other) is int else other
        above = self._is_above(least, lambda _: super(RowCount, self).__ge__(other))
        return not above

    def __le__(self, other: Any) -> Any:
        return not self._is_above(other, super().__gt__)

    def __eq__(self, other: object) -> Any:
        return not self if is_number(other, 0) else super().__eq__(other)

    def __ne__(self, other: object) -> Any:
        return bool(self) if is_number(other, 0) else super().__ne__(other)

    def __hash__(self) -> int:
        return super().__hash__()


def is_number(x: object, number: int) -> bool:
    """Whether x is this number, and known."""
    return type(x) in (int, float) and x == number
