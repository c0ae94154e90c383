"""Recognizes masks within a causal one, row by row if they are too large to make."""

from __future__ import annotations

from itertools import combinations_with_replacement

import torch
from torch import Tensor

from ...graph import Node, Value, resolve
from ...rewrite import Rewriter

# Ops that compare positions, and put comparisons together. What they make of row and
# column changes only where rows meet the numbers in them, so some rows tell of all.
COMPARES = frozenset(
    f"aten.{name}"
    for name in (
        *("add", "sub", "le", "lt", "ge", "gt", "eq", "ne", "to"),
        *("__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_not"),
        *("logical_and", "logical_or", "logical_not"),
    )
)
VIEWS = frozenset({"aten.reshape", "aten.expand", "aten.detach"})
SMALL = 2**20  # elements of what is evaluated whole
HIDDEN = -1e9  # a number this low, added to a score, leaves a weight of 0 in any dtype


def causal_window(rewriter: Rewriter, mask: Value) -> int | None:
    """How many columns up to its own number each row of a mask [..., rows, columns]
    shows, at most: all rows of a causal mask, fewer of a sliding window. None for
    another mask. Layers have one mask in common, which is looked at once.

    mask: of bool, or numbers that are added to scores."""
    if mask.name not in rewriter.windows:
        rewriter.windows[mask.name] = _window(rewriter, mask)
    return rewriter.windows[mask.name]


def _window(rewriter: Rewriter, mask: Value) -> int | None:
    rows, columns = mask.shape[-2:] if len(mask.shape) > 1 else (0, 1)
    if rows != columns:
        return None
    if (known := rewriter.constant(mask)) is not None:
        one = _of_one_sample(known)
        if one is not None and one.dtype != torch.bool:
            one = _shown(one)
        if one is None:
            return None
        window = int(one[-1].sum())
        shown = torch.ones_like(one).tril().triu(1 - window)
        return window if window and torch.equal(one, shown) else None
    numbers: set[int] = set()
    if mask.dtype != torch.bool or not _is_of_positions(rewriter, mask, numbers):
        return None
    window = rows
    for row in reversed(_telling(numbers, rows)):
        seen = _row(rewriter, mask, row, rows)
        if seen is None:
            return None
        if row == rows - 1:
            window = int(seen.sum())
        apart = row - torch.arange(columns)
        if not torch.equal(seen, (apart >= 0) & (apart < window)):
            return None
    return window or None


def _shown(added: Tensor) -> Tensor | None:
    """The mask of what added numbers do not hide; None if they do more than hide."""
    shown = added == 0
    return shown if bool((shown | (added <= HIDDEN)).all()) else None


def _telling(numbers: set[int], rows: int) -> list[int]:
    """The rows about the ends, and about each number and each sum of two."""
    marks = {0, rows, *numbers, *(-n for n in numbers)}
    sums = {a + b for a, b in combinations_with_replacement(sorted(marks), 2)}
    powers = {2**i for i in range(rows.bit_length())}
    near = {at + by for at in (*sums, *powers) for by in (-1, 0, 1)}
    return sorted(n for n in near if 0 <= n < rows)


def is_of_positions(rewriter: Rewriter, mask: Value) -> bool:
    """Whether a bool mask depends on the places of rows and columns alone."""
    return rewriter.constant(mask) is not None or _is_of_positions(
        rewriter, mask, set()
    )


def _is_of_positions(rewriter: Rewriter, x: Value, numbers: set[int]) -> bool:
    """Whether x compares positions; notes the constants in it."""
    known = rewriter.constant(x) if x.numel <= SMALL else None
    if known is not None and _is_position(known, numbers):
        return True
    node = rewriter.made.get(x.name)
    if node is None or node.name not in VIEWS | COMPARES:
        return node is not None and node.name == "aten.arange"
    numbers.update(n for n in node.args if isinstance(n, int) and abs(n) < 2**31)
    return all(_is_of_positions(rewriter, v, numbers) for v in node.operands)


def _is_position(x: Tensor, numbers: set[int]) -> bool:
    """Whether x [..., rows or 1, columns or 1] counts rows or columns from a number on,
    or is a number, the same for all samples; notes the number."""
    one = _of_one_sample(x)
    if one is None or 1 not in one.shape or x.is_floating_point():
        return False
    line = one.flatten().long()
    steps = line.diff().unique()
    numbers.add(int(line[0]))
    return len(steps) == 0 or (len(steps) == 1 and int(steps[0]) in (0, 1))


def _of_one_sample(x: Tensor) -> Tensor | None:
    """The rows and columns of x [..., rows, columns], None where samples differ."""
    rows, columns = (1, 1, *x.shape)[-2:]
    samples = x.reshape(-1, rows, columns)
    return samples[0] if bool((samples == samples[0]).all()) else None


def _row(rewriter: Rewriter, x: Value, row: int, rows: int) -> Tensor | None:
    """The columns of a row of x [..., rows or 1, columns or 1], without other dims."""
    if x.numel <= SMALL:
        whole = rewriter.constant(x)
        one = None if whole is None else _of_one_sample(whole)
        return None if one is None else one[row if len(one) == rows else 0]
    node: Node | None = rewriter.made.get(x.name)
    if node is None:
        return None
    name = node.name
    if name in VIEWS:
        inner = node.operands[0]
        same = name == "aten.expand" or inner.shape[-2:] == x.shape[-2:]
        return _row(rewriter, inner, row, rows) if same else None
    rows_of = {v.name: _row(rewriter, v, row, rows) for v in node.operands}
    if any(part is None for part in rows_of.values()):
        return None
    node = node.substitute(lambda v: rows_of[v.name])
    made: Tensor = resolve(node.op)(*node.args, **node.kwargs)
    return made
