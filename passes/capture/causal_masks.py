"""What of a causal mask another mask shows: one too large to be made, row by row."""

from __future__ import annotations

from itertools import combinations_with_replacement

import torch
from torch import Tensor

from ..capture.rewrite import Rewriter
from ..graph import Node, Value, resolve

# Ops that compare positions, and put comparisons together. What they make of row and
# column changes only where rows meet the numbers in them, so some rows tell of all.
COMPARES = frozenset(
    f"aten.{name}"
    for name in (
        *("add", "sub", "le", "lt", "ge", "gt", "to", "detach"),
        *("__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_not"),
        *("logical_and", "logical_or", "logical_not"),
    )
)
VIEWS = frozenset({"aten.reshape", "aten.expand"})
SMALL = 2**20  # elements of what is evaluated whole


def causal_window(rewriter: Rewriter, mask: Value) -> int | None:
    """How many columns up to its own number each row of a bool mask [..., rows,
    columns] shows, at most: all rows of a causal mask, fewer of a sliding window. None
    for another mask. Layers have one mask in common, which is looked at once."""
    if mask.name not in rewriter.windows:
        rewriter.windows[mask.name] = _window(rewriter, mask)
    return rewriter.windows[mask.name]


def _window(rewriter: Rewriter, mask: Value) -> int | None:
    rows, columns = mask.shape[-2:] if len(mask.shape) > 1 else (0, 1)
    if mask.dtype != torch.bool or rows != columns or mask.numel != rows * columns:
        return None
    if (known := rewriter.constant(mask)) is not None:
        known = known.reshape(rows, columns)
        window = int(known[-1].sum())
        shown = torch.ones_like(known).tril().triu(1 - window)
        return window if window and torch.equal(known, shown) else None
    numbers: set[int] = set()
    if not _is_of_positions(rewriter, mask, numbers):
        return None
    window = rows
    for row in reversed(_telling(numbers, rows)):
        found = _row(rewriter, mask, row, rows)
        if found is None:
            return None
        if row == rows - 1:
            window = int(found.sum())
        apart = row - torch.arange(columns)
        if not torch.equal(found, (apart >= 0) & (apart < window)):
            return None
    return window or None


def _telling(numbers: set[int], rows: int) -> list[int]:
    """Rows about the ends, and about what numbers and two of them come to."""
    marks = {0, rows, *numbers, *(-n for n in numbers)}
    sums = {a + b for a, b in combinations_with_replacement(sorted(marks), 2)}
    powers = {2**i for i in range(rows.bit_length())}
    near = {at + by for at in (*sums, *powers) for by in (-1, 0, 1)}
    return sorted(n for n in near if 0 <= n < rows)


def _is_of_positions(rewriter: Rewriter, x: Value, numbers: set[int]) -> bool:
    """Whether x is made of constants by comparing; notes the numbers in it."""
    node = rewriter.made.get(x.name)
    if node is None:
        return rewriter.constant(x) is not None and x.numel <= SMALL
    numbers.update(n for n in node.args if isinstance(n, int) and abs(n) < 2**31)
    name = node.name
    if name == "aten.arange":
        return True
    known = name in VIEWS or name in COMPARES
    small = x.numel <= 1 and rewriter.constant(x) is not None
    return small or (
        known and all(_is_of_positions(rewriter, v, numbers) for v in node.operands)
    )


def _row(rewriter: Rewriter, x: Value, row: int, rows: int) -> Tensor | None:
    """The columns of a row of x [..., rows or 1, columns or 1], without other dims."""
    if x.numel <= SMALL:
        whole = rewriter.constant(x)
        if whole is None or len(x.shape) < 2:
            return whole
        return whole.reshape(x.shape[-2:])[row if x.shape[-2] == rows else 0]
    node: Node | None = rewriter.made.get(x.name)
    if node is None:
        return None
    name = node.name
    if name in VIEWS:
        inner = node.operands[0]
        same = name == "aten.expand" or inner.shape[-2:] == x.shape[-2:]
        return _row(rewriter, inner, row, rows) if same else None
    found = {v.name: _row(rewriter, v, row, rows) for v in node.operands}
    if any(part is None for part in found.values()):
        return None
    node = node.substitute(lambda v: found[v.name])
    made: Tensor = resolve(node.op)(*node.args, **node.kwargs)
    return made
