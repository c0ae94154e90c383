"""Values along parts of choices, as rows: one for each of the choices, in their order;
and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...graph import Value
from ...rewrite import Rewriter
from ..rows.choices import Parts, complete, extent
from ..rows.turn_values import TurnsDiffer


class ChoiceRows:
    """rewriter: emits what moves values. count: of choices."""

    def __init__(self, rewriter: Rewriter, count: int) -> None:
        self.rewriter, self.count = rewriter, count

    def spread(self, x: Value, first: int, last: int, parts: Parts) -> Value:
        """x, whose dims from first to before last go along parts of the choices, as one
        dim of rows: for each of the choices what it is there."""
        every = complete(parts, self.count)
        if every is None or math.prod(x.shape[first:last]) != extent(parts):
            raise TurnsDiffer
        lead, rest, rewriter = x.shape[:first], x.shape[last:], self.rewriter
        x = rewriter.reshape(x, (*lead, *(n for _, n in parts), *rest))
        ordered = sorted(range(len(parts)), key=lambda i: parts[i], reverse=True)
        x = self._permuted(x, first, ordered)
        here = [n if own else 1 for (_, n), own in every]
        x = rewriter.reshape(x, (*lead, *here, *rest))
        x = rewriter.expand(x, (*lead, *(n for (_, n), _ in every), *rest))
        return rewriter.reshape(x, (*lead, self.count, *rest))

    def gather(self, rows: Value, first: int, parts: Parts) -> Value:
        """Rows along the first-th dim, as dims that go along parts of the choices:
        of several rows in one place the sum."""
        every = complete(parts, self.count)
        if every is None:
            raise TurnsDiffer
        lead, rest = rows.shape[:first], rows.shape[first + 1 :]
        shape = (*lead, *(n for (_, n), _ in every), *rest)
        x = self.rewriter.reshape(rows, shape)
        gone = tuple(first + i for i, (_, own) in enumerate(every) if not own)
        if gone:
            x = self.rewriter.emit("aten.sum.dim_IntList", x, gone)
        present = [part for part, own in every if own]
        return self._permuted(x, first, [present.index(part) for part in parts])

    def _permuted(self, x: Value, first: int, order: Sequence[int]) -> Value:
        if [*order] == [*range(len(order))]:
            return x
        dims = [*range(len(x.shape))]
        dims[first : first + len(order)] = [first + i for i in order]
        return self.rewriter.emit("aten.permute.default", x, tuple(dims))
