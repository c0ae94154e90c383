"""Rows that are looked up or written to by numbers which count: a view does it.

    x[arange(n)], x.gather(0, arange(n).repeat(k)[:, None].expand(-1, d))
    y.index_add(0, arange(n).repeat_interleave(k), x), cache[:, arange(4, 8)] = x

Whoever holds a part of the rows has those of its own then, and needs no others: Llama 4
gives each expert all tokens, and adds up what comes of them, this way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...graph import Node, Value
from ...ops.arguments import arguments
from ...rewrite import Rewriter, Rule
from ..normalize.decompose_slices import around, cut
from ..rows.rows import ADDING, ZEROS


@dataclass(frozen=True)
class Count:
    """Numbers from `start` to `end`, each `times` times, and all of that `rounds`
    times."""

    start: int
    end: int
    rounds: int
    times: int

    @property
    def extents(self) -> tuple[int, int, int]:
        return self.rounds, self.end - self.start, self.times


def count_of(numbers: torch.Tensor, extent: int) -> Count | None:
    """How integers [rows] count; -1 is the last of `extent`."""
    if numbers.ndim != 1 or not len(numbers) or numbers.dtype == torch.bool:
        return None
    numbers = numbers.long() % extent
    first = int(numbers[0])
    times = _first(numbers != first, len(numbers))
    singles = numbers[::times]
    end = first + _first(singles[1:] == first, len(singles) - 1) + 1
    rounds = len(singles) // (end - first)
    counted = torch.arange(first, end).repeat(rounds).repeat_interleave(times)
    same = torch.equal(numbers, counted)
    return Count(first, end, rounds, times) if same else None


def _first(mask: torch.Tensor, otherwise: int) -> int:
    """The position of the first row that a mask chooses."""
    return int(mask.int().argmax()) if mask.any() else otherwise


def look_up(rewriter: Rewriter, node: Node) -> Value | None:
    """`x[..., i]`, `x.index_select(dim, i)` and `x.gather(dim, i)`."""
    x = node.operands[0]
    if (numbered := _counted(rewriter, node)) is None:
        return None
    dim, count = numbered
    x = cut(rewriter, x, dim, count.start, count.end)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if count.rounds > 1 or count.times > 1:
        rounds, rows, times = count.extents
        x = rewriter.reshape(x, (*before, 1, rows, 1, *after))
        x = rewriter.expand(x, (*before, rounds, rows, times, *after))
    return rewriter.reshape(x, node.out.shape)


def write(rewriter: Rewriter, node: Node) -> Value | None:
    """`y[..., i] = x`, `y.index_copy(dim, i, x)`, `y.scatter(dim, i, x)`, and what adds
    x up there: `index_add`, `scatter_add`."""
    bound = arguments(node)
    y, adds = bound["self"], node.name in ADDING or bool(bound.get("accumulate"))
    x = next((bound[n] for n in ("src", "source", "values") if n in bound), None)
    if not isinstance(x, Value) or bound.get("alpha", 1) != 1 or bound.get("reduce"):
        return None
    if (numbered := _counted(rewriter, node)) is None:
        return None
    dim, count = numbered
    rounds, rows, times = count.extents
    if rounds * times > 1 and not adds:
        return None
    before, after = y.shape[:dim], y.shape[dim + 1 :]
    if node.name == "aten.index_put":
        own = bound["indices"][dim].shape
        x = rewriter.expand(x, (*before, *own, *after))
    elif x.shape != (*before, rounds * rows * times, *after):
        return None
    if rounds * times > 1:
        x = rewriter.reshape(x, (*before, rounds, rows, times, *after))
        x = rewriter.emit("aten.sum.dim_IntList", x, (dim, dim + 2))
    x = rewriter.reshape(x, (*before, rows, *after))
    if adds and not rewriter.producer(y, *ZEROS):
        old = cut(rewriter, y, dim, count.start, count.end)
        x = rewriter.emit("aten.add.Tensor", old, x)
    return around(rewriter, y, x, dim, count.start, count.end)


def _counted(rewriter: Rewriter, node: Node) -> tuple[int, Count] | None:
    """The dim whose rows a node numbers, and how the numbers count."""
    bound = arguments(node)
    x = bound["self"]
    if "indices" in bound:
        at = [(d, i) for d, i in enumerate(bound["indices"]) if i is not None]
        if len(at) != 1:
            return None
        ((dim, index),) = at
    else:
        dim, index = bound["dim"] % max(1, len(x.shape)), bound["index"]
        shape = index.shape
        if len(shape) > 1:  # that of what is looked up, or written
            index = _repeated(rewriter, index, dim)
            others = shape[:dim] + shape[dim + 1 :]
            if index is None or others != x.shape[:dim] + x.shape[dim + 1 :]:
                return None
    numbers = rewriter.constant(index) if x.shape else None
    count = None if numbers is None else count_of(numbers.flatten(), x.shape[dim])
    return None if count is None else (dim, count)


def _repeated(rewriter: Rewriter, index: Value, dim: int) -> Value | None:
    """The numbers along a dim, if they are the same along all others."""
    rows = index.shape[dim]
    while (copies := rewriter.producer(index, "aten.expand")) is not None:
        index = copies.operands[0]
    return index if index.numel == rows == max(index.shape, default=1) else None


COUNTED_RULES: dict[str, Rule] = {
    **dict.fromkeys(("aten.index", "aten.index_select", "aten.gather"), look_up),
    **dict.fromkeys((*ADDING, "aten.index_put", "aten.index_copy"), write),
    "aten.scatter": write,
}
