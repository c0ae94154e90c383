"""Which labels an op may have on an axis, whoever chooses among them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from passes.dims.linearity import passes_pending_sum
from passes.dims.name_dims import Dim, Factor
from passes.graph import Node
from passes.mesh import TIME

PASS = "pass"  # the op is applied to pending sums, and its result is one
Label = Factor | str | None


@dataclass(frozen=True)
class Allowed:
    """sizes: of axes. differentiable: names of values that gradients flow through."""

    sizes: Mapping[str, int]
    differentiable: Collection[str]

    def may_split(self, f: Factor, node: Node) -> bool:
        """A maximum that has a gradient stays whole: each rank would send it back to
        the largest of its own."""
        has_gradient = any(v.name in self.differentiable for v in node.results)
        return f.role != "whole" and not (f.role == "max" and has_gradient)

    def divides(self, axis: str, dim: Dim, labels: Mapping[str, Label]) -> bool:
        """Whether every rank of the axis gets a part of the dim. labels: what other
        axes split of the op."""
        parts = self.sizes[axis]
        for other, label in labels.items():
            if other != axis and isinstance(label, Factor) and label.dim == dim:
                parts *= self.sizes[other]
        return dim.size >= parts

    def may_pass(self, axis: str, node: Node, pending: Sequence[bool]) -> bool:
        """Pending sums travel on towards the loss; elsewhere they are resolved."""
        scalar = all(v.numel == 1 for v in node.results)
        if not (scalar or axis == TIME):
            return False
        if node.op == "aten.add.Tensor" and scalar and len(node.operands) == 2:
            return True
        return passes_pending_sum(node, list(pending))
