"""Ring attention: an axis splits the queries' rows and the keys alike.

Each rank keeps its own rows of queries, and keys and values are passed round, so that
no rank ever holds all of them (Liu 2023, arXiv 2310.01889). It is one more sharding
of an attention node: `comm.attention` is what it becomes on a rank, and its derivative
`comm.attention_backward` passes keys and values round once more, and their gradients
with them, instead of keeping what came by.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..dims.name_dims import Factor
from ..errors import ShardingConflict
from ..graph import Graph, Node
from ..plan import Plan
from ..shard.preference import RING

SOFTMAX = ("aten.softmax.int", "aten._softmax.default")
Q, K, V, MASK = range(4)  # operands of attention


def ring_factor(
    node: Node, factors: Sequence[Factor], differentiable: Collection[str]
) -> Factor | None:
    """Rows and keys of attention as the one dim that an axis splits; the columns of a
    mask stay whole. None where they are not the same dim, or are more than one, or
    where the mask is learned."""
    if node.op != "autopar.attention":
        return None
    if any(mask.name in differentiable for mask in node.operands[MASK:]):
        return None
    rows = [f for f in factors if any(p[:2] == (Q, 2) for p in f.operands)]
    keys = [f for f in factors if any(p[:2] == (K, 2) for p in f.operands)]
    if len(rows) != 1 or len(keys) != 1 or rows[0].dim != keys[0].dim:
        return None
    held = tuple(p for p in keys[0].operands if p[0] in (K, V))
    return Factor(rows[0].dim, "ring", (*rows[0].operands, *held), rows[0].outs)


def check_rings(
    graph: Graph, plan: Plan, op_shardings: Sequence[Mapping[str, object]]
) -> None:
    """Where a plan prefers rings, every attention must be one.

    Raises: ShardingConflict, at the first that is not; it would gather all keys.
    """
    wanted = [
        axis
        for axis in plan.axes
        if any(wanted.only == RING for wanted in plan.preferences(axis))
    ]
    for axis in wanted:
        count = 0
        for node, chosen in zip(graph.nodes, op_shardings, strict=True):
            if node.op != "autopar.attention":
                continue
            count += 1
            op_sharding = chosen[axis]
            if not (isinstance(op_sharding, Factor) and op_sharding.role == "ring"):
                raise _refusal(axis, str(node), str(node.location))
        if not count:
            raise _not_fused(axis, graph)


def _refusal(axis: str, what: str, source: str) -> ShardingConflict:
    return ShardingConflict(
        f"'{axis}' cannot pass keys and values round in {what}: that takes "
        "self-attention without a learned bias, and a row for each rank",
        source=source,
        fix="use context_parallel='gather'",
    )


def _not_fused(axis: str, graph: Graph) -> ShardingConflict:
    """Says that a graph has no fused attention: where one is written out, or has
    dropout, which takes it apart, the place is told."""
    what = (
        f"'{axis}' cannot pass keys and values round: the model has no fused attention"
    )
    scores = [n for n in graph.nodes if n.op in SOFTMAX and len(n.out.shape) > 2]
    if not scores:
        return ShardingConflict(what, fix="use context_parallel='gather'")
    made = {scores[0].out.name}
    dropped = False
    for node in graph.nodes:
        if made & {v.name for v in node.operands}:
            dropped = dropped or node.op == "autopar.dropout"
            if node.op.partition(".")[2].startswith(("masked_fill", "_to_copy", "to.")):
                made |= {v.name for v in node.results}
    without = " with dropout_p=0.0" if dropped else ""
    return ShardingConflict(
        f"{what}, but one in several operations{' with dropout' if dropped else ''}",
        source=str(scores[0].location),
        fix="use context_parallel='gather', or compute it by "
        f"F.scaled_dot_product_attention{without}",
    )
