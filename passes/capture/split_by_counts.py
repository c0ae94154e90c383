"""Rows that are split by how many each expert has, and its outputs, joined again.

    counts = torch.bincount(chosen, minlength=8).tolist()
    y = torch.cat([expert(part) for expert, part in zip(experts, x.split(counts))])

How many there are is known only when a program runs. But piece e has the rows that come
e-th by the counts, whichever these are; so it is read as rows that are chosen, and what
is joined, of all pieces in their order, as written to these rows:

    e_of_row = torch.arange(8).repeat_interleave(counts, output_size=len(x))
    y[e_of_row == 0], y[e_of_row == 1] ... = ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..capture.values_read import has_shape

SPLITS = (
    *(torch.split, torch.split_with_sizes),
    *(Tensor.split, Tensor.split_with_sizes),
)
JOINS = (torch.cat, torch.concat, torch.concatenate)


class Counts(list[Any]):
    """Numbers that `tolist` gave, of a tensor."""

    def __init__(self, numbers: Sequence[Any], of: Tensor) -> None:
        super().__init__(numbers)
        self.of = of


class Pieces:
    """Pieces that were split, by the symbol that stands for how many rows one has."""

    def __init__(self) -> None:
        # By the counts' id and how many rows there are: the counts, and each piece's.
        self._rows: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}
        self._numbers: dict[Any, tuple[tuple[int, int], int]] = {}

    def instead(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Pieces of rows, or all rows of pieces; None of other calls."""
        if func in SPLITS:
            return self._split(*args, **kwargs)
        return self._join(*args, **kwargs) if func in JOINS else None

    def _split(
        self, x: Any, sizes: Any = None, dim: int = 0, **named: Any
    ) -> tuple[Tensor, ...] | None:
        sizes = next(iter(named.values())) if sizes is None and named else sizes
        if not isinstance(sizes, Counts) or dim not in (0, -x.ndim) or not has_shape(x):
            return None
        counts, key = sizes.of, (id(sizes.of), x.shape[0])
        if key not in self._rows:
            numbers = torch.arange(len(sizes), device=counts.device)
            each = numbers.repeat_interleave(counts, output_size=x.shape[0])
            rows = [torch.where(each == number)[0] for number in range(len(sizes))]
            self._rows[key] = counts, rows
            symbols = (r.shape[0].node.expr for r in rows)
            self._numbers |= {s: (key, n) for n, s in enumerate(symbols)}
        return tuple(x[rows] for rows in self._rows[key][1])

    def _join(self, tensors: Any, dim: int = 0, **named: Any) -> Tensor | None:
        dim = named.get("axis", dim)
        if not isinstance(tensors, tuple | list) or not tensors:
            return None
        symbols = [_symbol(x) for x in tensors]
        key, _ = self._numbers.get(symbols[0], (None, 0))
        if key is None or dim not in (0, -tensors[0].ndim):
            return None
        if [self._numbers.get(s) for s in symbols] != [
            (key, n) for n in range(len(self._rows[key][1]))
        ]:
            return None
        x = tensors[0]
        y = torch.empty((key[1], *x.shape[1:]), dtype=x.dtype, device=x.device)
        for rows, x in zip(self._rows[key][1], tensors, strict=True):
            y[rows] = x
        return y


def _symbol(x: Any) -> Any:
    """What stands for how many rows a tensor has, if that is not known."""
    n = x.shape[0] if isinstance(x, Tensor) and x.ndim else 0
    return n.node.expr if isinstance(n, torch.SymInt) else None
