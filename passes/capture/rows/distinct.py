"""Masks of which one element at most is chosen along a dim, as the experts that one
token chose differ: compared with a number, no more than one of them is equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...graph import Node, Value
from ...ops.op import op_of
from ...ops.reductions import topmost
from ...ops.row_dims import dim_after
from ...ops.rules import equation

WIDE = (torch.int16, torch.int32, torch.int64)


def one_at_most(v: Value, made: Mapping[str, Node]) -> frozenset[int]:
    """The dims of a mask, or of integers, along which one at most is not 0.

    made: value name -> what made it.
    """
    node = made.get(v.name)
    if node is None or not node.operands:
        return frozenset()
    x = node.operands[0]
    if op_of(node).stays:
        return one_at_most(x, made)
    if node.name in ("aten.ne", "aten.gt") and node.arg("other") == 0:
        return one_at_most(x, made)
    if node.name == "aten.one_hot":
        return distinct_dims(x, made)
    if node.name == "aten.eq":
        return frozenset(d for o in node.operands for d in _compared(node, o, made))
    return frozenset(_after(node, d) for d in one_at_most(x, made)) - {-1}


def distinct_dims(v: Value, made: Mapping[str, Node]) -> frozenset[int]:
    """The dims of integers along which no two are equal."""
    node = made.get(v.name)
    if node is None or not node.operands or v.dtype not in WIDE:
        return frozenset()
    if op_of(node).rule is topmost:
        rank = len(v.shape)
        return frozenset(
            {node.arg("dim") % rank} if v == node.outs[-1] and rank else ()
        )
    dims = distinct_dims(node.operands[0], made)
    if op_of(node).stays:
        return dims
    return frozenset(_after(node, d) for d in dims) - {-1}


def _compared(node: Node, v: Value, made: Mapping[str, Node]) -> set[int]:
    """The dims of a comparison along which one operand differs, and none other is more
    than one number."""
    rank = len(node.out.shape)
    back = {d - len(v.shape) for d in distinct_dims(v, made)}
    for o in node.operands:
        if o is not v:
            back = {d for d in back if -d > len(o.shape) or o.shape[d] == 1}
    return {d + rank for d in back}


def _after(node: Node, dim: int) -> int:
    """The dim of a view's result that a dim of its operand becomes; -1 if none."""
    if op_of(node).view == "shape":
        return dim_after(node.operands[0].shape, node.out.shape, dim)
    if op_of(node).view == "part" and (
        len(node.results[0].shape) == len(node.operands[0].shape)
    ):
        return dim  # of which there are fewer
    rule = equation(node) if op_of(node).view in ("order", "part") else None
    letters = rule and rule.operands[0][dim]
    return rule.outs[0].index(letters) if rule and letters in rule.outs[0] else -1
