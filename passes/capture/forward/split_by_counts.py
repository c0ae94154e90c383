"""Rows that are split by how many each expert has, and its outputs, joined again.

    counts = torch.bincount(chosen, minlength=8).tolist()
    y = torch.cat([expert(part) for expert, part in zip(experts, x.split(counts))])

How many there are is known only when a program runs. But piece e has the rows that come
e-th by the counts, whichever these are; so it is read as rows that are chosen, and what
is joined, of all pieces in their order, as written to these rows:

    e_of_row = torch.arange(8).repeat_interleave(counts, output_size=len(x))
    y[e_of_row == 0], y[e_of_row == 1] ... = ...

Pieces without rows may be left out, as `passes.capture.forward.guards` proves: of a
reading in which some have none, the others are all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..forward.numbers_present import INDEX
from ..forward.values_read import has_shape

SPLITS = (
    *(torch.split, torch.split_with_sizes),
    *(Tensor.split, Tensor.split_with_sizes),
)
JOINS = (torch.cat, torch.concat, torch.concatenate)


@dataclass(frozen=True)
class Counts:
    """The symbols that `tolist` returned of a tensor, after `written` writes."""

    of: Tensor
    symbols: tuple[Any, ...]
    written: int


@dataclass(frozen=True)
class Group:
    """The pieces that counts split rows into. rows: int64, of each piece."""

    counts: Tensor
    size: int
    rows: tuple[Tensor, ...]


class Pieces:
    """Pieces that were split, by the symbol that stands for how many rows one has."""

    def __init__(self, counted: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """counted: counts by their id, and the numbers of which each is one."""
        self._counted = counted
        self._groups: dict[tuple[Any, int], Group] = {}  # by the counts, and all rows
        self._pieces: dict[Any, tuple[Group, int]] = {}
        self._counts: dict[Any, tuple[Counts, int]] = {}  # by the symbol of a number
        # Tensors that say whether a count is 0, by their id: of which, of how many.
        self._asked: dict[int, tuple[Tensor, int, int]] = {}
        # What all pieces were joined to, one call behind the other, and the next call.
        self._joined: list[tuple[tuple[int, ...], torch.dtype, torch.device]] = []
        self._next = 0

    def begin(self) -> None:
        """Forgets all of another forward, whose symbols have the same names, but what
        that joined."""
        for known in (self._groups, self._pieces, self._counts, self._asked):
            known.clear()
        self._next = 0

    def listed(self, numbers: Sequence[Any], of: Tensor) -> Sequence[Any]:
        """The list that `tolist` of an integer tensor returns; notes it."""
        counts = Counts(of, tuple(map(_expression, numbers)), _version(of))
        for e, n in enumerate(numbers):
            self._counts[_expression(n)] = counts, e
            if (asked := getattr(n, "x", None)) is not None:
                self._asked[id(asked)] = asked, e, len(numbers)
        return numbers

    def number(self, x: Any) -> tuple[int, int] | None:
        """The piece whose rows x has, or asks about: (number, how many pieces there
        are)."""
        if id(x) in self._asked:
            return self._asked[id(x)][1:]
        group, number = self._pieces.get(_rows(x), (None, 0))
        return None if group is None else (number, len(group.rows))

    def instead(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], some: bool
    ) -> Any:
        """Pieces of rows, or all rows of pieces; None of other calls. some: whether
        all pieces have rows."""
        if func in SPLITS and len(args) in (2, 3) and not kwargs.keys() - {"dim"}:
            return self._split(*args, **kwargs)
        if func == INDEX:
            return self._part(args[0], args[1], some)
        if func in JOINS and args and not kwargs.keys() - {"dim", "axis"}:
            dim = kwargs.get("dim", kwargs.get("axis", 0))
            return self._join(args[0], args[1] if len(args) > 1 else dim, some)
        return None

    def _known(self, first: Any) -> tuple[Counts, int] | tuple[None, int]:
        """The counts that a number is one of, and its index among them."""
        counts, e = self._counts.get(_expression(first), (None, 0))
        as_listed = counts is not None and _version(counts.of) == counts.written
        return (counts, e) if counts is not None and as_listed else (None, 0)

    def _group(self, counts: Counts, size: int) -> Group:
        key = counts.symbols, size
        if key not in self._groups:
            every = len(counts.symbols)
            numbers = torch.arange(every, device=counts.of.device)
            each = numbers.repeat_interleave(counts.of, output_size=size)
            rows = tuple(torch.where(each == e)[0] for e in range(every))
            group = self._groups[key] = Group(counts.of, size, rows)
            self._pieces |= {_rows(r): (group, e) for e, r in enumerate(rows)}
        return self._groups[key]

    def _split(self, x: Any, sizes: Any, dim: int = 0) -> tuple[Tensor, ...] | None:
        if not isinstance(sizes, list | tuple) or not sizes or not has_shape(x):
            return None
        counts, _ = self._known(sizes[0])
        if counts is None or dim not in (0, -x.ndim):
            return None
        if tuple(map(_expression, sizes)) != counts.symbols:
            return None
        return tuple(x[rows] for rows in self._group(counts, x.shape[0]).rows)

    def _part(self, x: Any, part: Any, some: bool) -> Tensor | None:
        """x[start : start + count], of a start that is the sum of the counts before."""
        if not isinstance(part, slice) or not isinstance(part.stop, torch.SymInt):
            return None
        start = 0 if part.start is None else _expression(part.start)
        counts, e = self._known(part.stop.node.expr - start)
        if counts is None or part.step is not None or not has_shape(x):
            return None
        _, numbers = self._counted.get(id(counts.of), (None, None))
        if numbers is None or numbers.numel() != x.shape[0]:
            return None  # who knows whether these are all rows
        before = counts.symbols[:e]
        left_out = sum(before) - start
        whole = left_out == 0 if some else {*_terms(left_out)} <= {*before}
        return x[self._group(counts, x.shape[0]).rows[e]] if whole else None

    def _join(self, tensors: Any, dim: int, some: bool) -> Tensor | None:
        if not isinstance(tensors, tuple | list):
            return None
        if not tensors and not some and self._next < len(self._joined):
            shape, dtype, device = self._joined[self._next]
            self._next += 1
            return torch.empty(shape, dtype=dtype, device=device)
        symbols = [_rows(x) for x in tensors]
        if not symbols or not {*symbols} <= self._pieces.keys():
            return None
        x, *others = tensors
        group, _ = self._pieces[symbols[0]]
        pieces = [self._pieces[symbol] for symbol in symbols]
        numbers = [number for of, number in pieces if of is group]
        alike = all(other.dtype == x.dtype for other in others)
        if len(numbers) < len(pieces) or dim not in (0, -x.ndim) or not alike:
            return None
        every = [*range(len(group.rows))]
        if numbers != (every if some else sorted({*numbers})):
            return None
        made = (group.size, *x.shape[1:]), x.dtype, x.device
        self._joined[self._next :] = [made]
        self._next += 1
        y = torch.empty(made[0], dtype=x.dtype, device=x.device)
        for number, x in zip(numbers, tensors, strict=True):
            y[group.rows[number]] = x
        return y


def _rows(x: Any) -> Any:
    """The symbol for a tensor's number of rows, if that is unknown."""
    n = x.shape[0] if isinstance(x, Tensor) and not has_shape(x) else 0
    return n.node.expr if isinstance(n, torch.SymInt) else None


def _version(x: Tensor) -> int:
    """How often a tensor was written to; no mode of a capture is told of this look."""
    with torch._C.DisableTorchFunction():
        return x._version


def _expression(n: Any) -> Any:
    return n.node.expr if isinstance(n, torch.SymInt) else n


def _terms(total: Any) -> Any:
    return () if total == 0 else total.as_ordered_terms()
