"""overlaps: whether a write reads what it has just written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...graph import Node, Value, map_values
from ...ops.evaluate import function_of


def overlap_in_part(
    root: Value, one: Iterable[Node], other: Iterable[Node]
) -> bool | None:
    """Whether two views share elements, but are not the same ones in the same order.
    None where that is not known.

    root: what both are views of. one, other: how each is taken of it, step by step.
    """
    whole = torch.empty(root.shape, dtype=root.dtype, device="meta")
    x, y = (_taken(whole, views) for views in (one, other))
    apart = y.storage_offset() - x.storage_offset()
    if not x.numel() or not y.numel() or (not apart and _box(x) == _box(y)):
        return False
    if x.ndim != y.ndim:
        return None
    dims = []
    for (n, s), (m, t) in zip(_box(x), _box(y), strict=True):
        if n > 1 and m > 1 and s != t:
            return None
        if n > 1 or m > 1:
            dims.append((n, m, max(s, t)))
    return _meet(apart, sorted(dims, key=lambda dim: -dim[2]))


def _box(x: Tensor) -> list[tuple[int, int]]:
    """Size and stride of each dim; of a single element any stride will do."""
    dims = zip(x.shape, x.stride(), strict=True)
    return [(n, stride if n > 1 else 0) for n, stride in dims]


def _taken(x: Tensor, views: Iterable[Node]) -> Tensor:
    for node in views:
        of = dict.fromkeys(node.operands, x)  # the one
        args, kwargs = map_values(of.__getitem__, (node.args, {**node.kwargs}))
        x = function_of(node.op)(*args, **kwargs)
    return x


def _meet(apart: int, dims: Sequence[tuple[int, int, int]]) -> bool:
    """Whether an element of one box lies where one of the other does.

    apart: of their first elements, in memory. dims: sizes in both, and the stride, the
    largest first: a box in a contiguous tensor has none between two of its rows.
    """
    if not dims:
        return apart == 0
    (n, m, stride), *rest = dims
    steps = {0, apart // stride, -(-apart // stride)} if stride else {0}
    return any(_meet(apart - step * stride, rest) for step in steps if -m < step < n)
