"""Rows that a mask chooses, and where they go in what is done row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..capture.distinct import dim_after
from ..graph import Graph, Node, Value, parameters
from ..ops.op import op_of
from ..ops.reductions import dims_of
from ..ops.rules import equation, is_pointwise

SETTING = ("aten.index_put", "aten.index_copy")
ADDING = ("aten.index_add", "aten.scatter_add")
CHOOSES = "aten.where.default"
OWN_MASKS = (
    "dropout of rows that the data choose leaves out elements by the row; the model by "
    "itself leaves out others, by a row's place among those that were chosen"
)


@dataclass(frozen=True)
class Rows:
    """Rows that a mask chooses. chosen: bool [rows], which. mask: what chooses them, or
    the values made of it. dim: which dim of a value goes along them. factor: of what
    counts them, which dim of `extents`, whose product they are; else None."""

    chosen: Value
    mask: str
    source: str
    extents: tuple[int, ...]
    dim: int = 0
    factor: int | None = None

    @property
    def count(self) -> int:
        return math.prod(self.extents)


def is_accumulated(node: Node, rows: Collection[str]) -> bool:
    """Whether a node writes rows into a tensor that is not of rows."""
    return node.name in (*SETTING, *ADDING) and node.operands[0].name not in rows


def has_own_masks(graph: Graph) -> bool:
    """Whether there is dropout of rows that the data choose. Its mask goes by the row;
    that of a model that runs by itself by a row's place among those that it chose."""
    rows: set[str] = set()
    for node in graph.nodes:
        if node.op == CHOOSES or any(v.name in rows for v in node.operands):
            if node.name == "aten.dropout" and is_on(node):
                return True
            if not is_accumulated(node, rows):
                rows.update(v.name for v in node.results)
    return False


def is_on(dropout: Node) -> bool:
    """Whether an `aten.dropout` leaves anything out."""
    return bool(dropout.arg("train")) and dropout.arg("p") > 0


def along(node: Node, of: Callable[[Value], Rows | None]) -> int | None:
    """The dim of the results that goes along the rows, of what is done row by row."""
    x, out = node.operands[0], next(v for v in node.outs if v is not None)
    rows = of(x)
    if op_of(node).view == "shape":
        place = dim_after(x.shape, out.shape, rows.dim) if rows else -1
        return None if place < 0 else place
    if op_of(node).elements:
        return rows.dim if rows and out.shape == x.shape else None
    row_dims = {v.name: r.dim - len(v.shape) for v in node.operands if (r := of(v))}
    if "keepdim" in parameters(node.op):  # it goes along dims, and leaves these out
        gone = dims_of(node)
        if rows is None or rows.dim in gone:
            return None
        kept = len(out.shape) == len(x.shape)
        return rows.dim - sum(not kept and d < rows.dim for d in gone)
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
