"""Which values share memory, and which ops write over what they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from types import MappingProxyType

import torch

from ..graph import Node
from ..ops.arguments import shows_operand
from ..ops.op import OPS, is_view

Shape = tuple[int, ...]
# To add to an operand, and to several.
ADD, ADD_EACH = "autopar.add_", "autopar.add_each_"
# Ops that have a form that writes over the first operand -> that form.
IN_PLACE = {op.op: op.op_in_place for op in OPS.values() if op.in_place}
WRITTEN_IN_PLACE = frozenset(IN_PLACE.values())


def arrives_in_place(start: Node) -> bool:
    """Whether a gathered tensor is a view of the message, which holds it alone."""
    if start.op != "comm.start_gather":
        return False
    (x, *more), (dim, *_) = start.arg("xs"), start.arg("dims")
    return not more and prod(x.shape[:dim]) == 1 and not start.arg("wholes")


def find_owners(
    nodes: Sequence[Node], entering: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Value -> the value whose memory it may share; itself if its memory is new.

    entering: owners of values from outside that count too; what shares memory with
    another one from outside has no owner.
    """
    owner = dict(entering)
    alone: set[str] = set()
    expands: dict[str, Node] = {}
    for node in nodes:
        if not node.results:
            continue
        if arrives_in_place(node):
            alone.add(node.out.name)
        waits = node.op == "comm.wait" and node.operands[0].name in alone
        shares = waits or is_in_place(node) or may_alias(node)
        if node.name == "aten.expand":
            expands[node.out.name] = node
        if not shares or _copies(node, expands):
            for v in node.results:
                owner[v.name] = v.name
        elif node.operands and (base := owner.get(node.operands[0].name)):
            for v in node.results:
                owner[v.name] = base
    return owner


def _copies(node: Node, expands: Mapping[str, Node]) -> bool:
    """Whether a reshape makes the copies that an expand stands for, as where keys are
    repeated for the heads of their group."""
    if node.op != "aten.reshape.default":
        return False
    expand = expands.get(node.operands[0].name)
    if expand is None or expand.operands[0].name in expands:
        return False
    return not _views(expand.operands[0].shape, expand.out.shape, node.out.shape)


@cache
def _views(shape: Shape, expanded: Shape, viewed: Shape) -> bool:
    """Whether an expanded tensor may be viewed in that shape."""
    try:
        torch.empty(shape, device="meta").expand(expanded).view(viewed)
    except RuntimeError:
        return False
    return True


def is_in_place(node: Node) -> bool:
    """Whether `reuse` has put the node's result into its first operand's memory."""
    return node.op in WRITTEN_IN_PLACE or bool(node.kwargs.get("inplace"))


def may_alias(node: Node) -> bool:
    """Whether a result may be a view of an operand."""
    is_part = is_view(node) or node.op == "comm.shard"
    if not is_part and not shows_operand(node.op, True):
        return False
    return node.name != "aten.to" or node.out.dtype is node.operands[0].dtype


def takes_memory(node: Node) -> bool:
    """Whether running the node may take memory: not for a view, or over an operand."""
    if is_in_place(node) or node.op in (ADD, ADD_EACH):
        return False
    if node.op == "aten.reshape.default":
        return not _splits_only(node.operands[0].shape, node.out.shape)
    kind = node.name
    copies = node.is_comm or kind in ("aten.to", "aten.contiguous")
    return copies or not may_alias(node)


def _splits_only(shape: Sequence[int], into: Sequence[int]) -> bool:
    """Whether each dim becomes one or several: then no strides make it a copy."""
    left = list(into)
    for n in shape:
        extent = 1
        while left and (extent < n or (left[0] == 1 and n != 1)):
            extent *= left.pop(0)
        if extent != n:
            return False
    return all(n == 1 for n in left)
