"""The alternatives that ops declare to their rules, as dims that an axis may split.

Whoever chooses what an axis splits of an op, a plan's order of preference, a plan's own
word for the op or a search, chooses among these as among the dims of its rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..dims.name_dims import Factor
from ..graph import Node
from ..ops.op import Alternative, op_of
from ..shard.op_sharding import Allowed, OpSharding


def alternative_factors(
    node: Node,
    factors: Sequence[Factor],
    allowed: Allowed,
    others: Mapping[str, OpSharding],
) -> list[Factor]:
    """The alternatives of a node that an axis may take, each a factor whose role is the
    alternative's name. factors: of its rule. others: op shardings on other axes, as one
    alone may have an alternative."""
    possible = []
    for way in op_of(node).alternatives:
        along = [f for f in factors if _splits(f, way.along) and f.role != "whole"]
        if way.named:
            along = [f for f in along if f.dim.name == way.named]
        beside = [f for f in factors if _splits(f, way.beside[0])]
        operands = dict(enumerate(node.operands))
        read = [operands[k] for k in way.constant if k in operands]
        if (
            len(along) != 1
            or len(beside) != 1
            or not (way.named or along[0].dim == beside[0].dim)
            or any(v.name in allowed.differentiable for v in read)
            or any(alternative_of(node, other) == way for other in others.values())
        ):
            continue
        (a,), (b,) = along, beside
        places = tuple(p for p in b.operands if p[:2] in way.beside)
        possible.append(Factor(b.dim, way.name, (*a.operands, *places), a.outs))
    return possible


def alternative_of(node: Node, op_sharding: OpSharding) -> Alternative | None:
    """The alternative that an op sharding is, if it is one."""
    role = op_sharding.role if isinstance(op_sharding, Factor) else ""
    return next((way for way in op_of(node).alternatives if way.name == role), None)


def _splits(f: Factor, place: tuple[int, int]) -> bool:
    return any(p[:2] == place for p in f.operands)
