"""Rows that a mask chooses."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ...graph import Graph, Node, Value

SETTING = ("aten.index_put", "aten.index_copy")
ADDING = ("aten.index_add", "aten.scatter_add")
ZEROS = ("aten.zeros", "aten.zeros_like", "aten.new_zeros")
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
