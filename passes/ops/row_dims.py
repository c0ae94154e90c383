"""The dims along which ops work row by row, before and after."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..graph import Node, Value, parameters
from ..ops.op import op_of
from ..ops.reductions import dims_of
from ..ops.rules import equation, is_pointwise


def dim_after(old: tuple[int, ...], new: tuple[int, ...], dim: int) -> int:
    """The dim that a dim of a tensor becomes in a reshape; -1 if none."""
    return next(
        (
            d
            for d, n in enumerate(new)
            if n == old[dim] and math.prod(new[:d]) == math.prod(old[:dim])
        ),
        -1,
    )


def along(node: Node, dim_of: Callable[[Value], int | None]) -> int | None:
    """The dim of a node's results along rows, if it works row by row; else None.
    dim_of: the dim of an operand along rows, if it has one."""
    x, out = node.operands[0], next(v for v in node.outs if v is not None)
    dim = dim_of(x)
    if op_of(node).view == "shape":
        place = -1 if dim is None else dim_after(x.shape, out.shape, dim)
        return None if place < 0 else place
    if op_of(node).elements:
        return dim if out.shape == x.shape else None
    row_dims = {
        v.name: own - len(v.shape)
        for v in node.operands
        if (own := dim_of(v)) is not None
    }
    if "keepdim" in parameters(node.op):  # it goes along dims, and leaves these out
        gone = dims_of(node)
        if dim is None or dim in gone:
            return None
        kept = len(out.shape) == len(x.shape)
        return dim - sum(not kept and d < dim for d in gone)
    if is_pointwise(node):
        (back, *more) = set(row_dims.values())
        others = [v for v in node.operands if v.name not in row_dims]
        if more or any(len(v.shape) >= -back and v.shape[back] != 1 for v in others):
            return None
        return back + len(out.shape)
    if node.name == "aten.linear":
        node = node.with_args(bias=None)
    rule = equation(node)
    if rule is None:
        return None
    pairs = list(zip(node.operands, rule.operands, strict=True))
    names = {dims[row_dims[v.name]] for v, dims in pairs if v.name in row_dims}
    if len(names) != 1:
        return None
    (letters,) = names
    if len(letters) != 1 or rule.roles[letters[0]] != "map":
        return None
    for v, dims in pairs:
        if v.name not in row_dims and any(
            letters[0] in names and n != 1
            for names, n in zip(dims, v.shape, strict=True)
        ):
            return None
    places = {dims.index(letters) if letters in dims else -1 for dims in rule.outs}
    return places.pop() if len(places) == 1 and -1 not in places else None
