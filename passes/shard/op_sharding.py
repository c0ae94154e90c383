"""Which shardings an op may have on an axis, whoever chooses among them, and in which
states it then needs its operands and makes its results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..dims.name_dims import Dim, Factor
from ..graph import Node
from ..mesh import TIME
from ..ops.linearity import is_jointly_linear, passes_pending_sum
from ..ops.notation import PENDING
from ..shard.resharding import MAX, Need, P, R, State, V

PASS = "pass"  # the op is applied to pending sums, and its result is one
OpSharding = Factor | str | None


@dataclass(frozen=True)
class Allowed:
    """sizes: of axes. differentiable: names of values that gradients flow through."""

    sizes: Mapping[str, int]
    differentiable: Collection[str]

    def may_split(self, f: Factor, node: Node) -> bool:
        """Whether an axis may split a factor; a differentiable maximum stays whole, as
        each rank would send the gradient to its own largest."""
        has_gradient = any(v.name in self.differentiable for v in node.results)
        return f.role != "whole" and not (f.role == "max" and has_gradient)

    def divides(
        self, axis: str, dim: Dim, op_shardings: Mapping[str, OpSharding]
    ) -> bool:
        """Whether every rank of the axis gets a part of the dim. op_shardings: on
        other axes."""
        axes = {axis} | {
            other
            for other, own in op_shardings.items()
            if isinstance(own, Factor) and own.dim == dim
        }
        return dim.size >= prod(self.sizes[a] for a in axes)

    def may_pass(self, axis: str, node: Node, pending: Sequence[bool]) -> bool:
        """Pending sums travel on towards the loss; elsewhere they are resolved."""
        scalar = all(v.numel == 1 for v in node.results)
        if not (scalar or axis == TIME):
            return False
        if node.op == "aten.add.Tensor" and scalar and len(node.operands) == 2:
            return True
        return passes_pending_sum(node, list(pending))


def made_state(op_sharding: OpSharding, which: int) -> State:
    """Returns how an op with this sharding makes one of its results."""
    if op_sharding == PASS:
        return P
    if not isinstance(op_sharding, Factor):
        return R
    place = next(((d, i) for out, d, i in op_sharding.outs if out == which), None)
    pending = PENDING.get(op_sharding.role)
    return place or (R if pending is None else P if pending == "sum" else MAX)


def needed_state(node: Node, which: int, axis: str, op_sharding: OpSharding) -> Need:
    """Returns how a node with this sharding on an axis needs one of its operands."""
    if op_sharding == PASS:
        joins = node.op == "aten.add.Tensor"
        joins |= axis == TIME and is_jointly_linear(node)
        return Need(V, passes=True, joins=joins)
    if not isinstance(op_sharding, Factor):
        return Need(R)
    place = next(((d, i) for op, d, i in op_sharding.operands if op == which), None)
    return Need(place or V)
