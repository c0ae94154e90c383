"""Ring attention: an axis splits the queries' rows and the keys alike.

Each rank keeps its own rows of queries, and keys and values are passed round, so that
no rank ever holds all of them (Liu 2023, arXiv 2310.01889). It is one more sharding
of an attention node: `comm.attention` is what it becomes on a rank, and its derivative
`comm.attention_backward` passes keys and values round once more, and their gradients
with them, instead of keeping what came by.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..dims.name_dims import Factor, Named
from ..errors import ShardingConflict
from ..graph import Graph, Node, bare
from ..ops.attention import RING, K, Q, V
from ..plan import Plan, Preference
from ..shard.alternatives import alternative_of
from ..shard.op_sharding import OpSharding

SOFTMAX = ("aten.softmax.int", "aten._softmax.default")


def has_rings(plan: Plan, axis: str) -> bool:
    """Whether keys and values of any attention are passed round on an axis."""
    preferred = plan.op_shardings.get(axis, {}).values()
    return prefers_rings(plan, axis) or any(
        Preference.parse(text).only == RING for text in preferred if text
    )


def prefers_rings(plan: Plan, axis: str) -> bool:
    """Whether it was demanded that every attention is a ring on an axis."""
    return any(wanted.only == RING for wanted in plan.preferences(axis))


def check_rings(
    named: Named,
    plan: Plan,
    op_shardings: Sequence[Mapping[str, OpSharding]],
    preferred: Collection[tuple[str, str]],
) -> None:
    """Checks that where a plan prefers rings, every attention is one.

    Exempt are those for which the plan says otherwise, and those whose keys are split
    as their queries are, as within chunks. preferred: their first results, and the
    axes. Raises: ShardingConflict, at the first that is not; it would gather all keys.
    """
    for axis in plan.axes:
        if not prefers_rings(plan, axis):
            continue
        count = 0
        for node, chosen in zip(named.graph.nodes, op_shardings, strict=True):
            if node.op != "autopar.attention":
                continue
            count += 1
            is_planned = (node.results[0].name, axis) in preferred
            if not is_planned and _gathers_keys(node, chosen[axis]):
                raise _refusal(axis, node, named, plan.size(axis))
        if not count:
            raise _not_fused(axis, named.graph)


def _gathers_keys(node: Node, chosen: OpSharding) -> bool:
    if not isinstance(chosen, Factor):
        return True
    split = {operand for operand, *_ in chosen.operands}
    return alternative_of(node, chosen) is None and not {Q, K, V} <= split


def _refusal(axis: str, node: Node, named: Named, ranks: int) -> ShardingConflict:
    rows, keys = (named.dims[v.name][2] for v in node.operands[:2])
    if rows != keys:
        reason = "the keys are of other rows than the queries"
    elif len(rows) > 1:
        reason = (
            f"its rows are ({' '.join(d.name for d in rows)}), as some layer, or a "
            "loss by chunks, sees them in chunks, and a ring takes rows of one dim"
        )
    elif rows and rows[0].size < ranks:
        reason = f"{rows[0].size} rows are too few for {ranks} ranks"
    else:
        reason = (
            "a bias of its scores is learned, or another axis passes its keys round"
        )
    return ShardingConflict(
        f"'{axis}' cannot pass keys and values round in {node}: {reason}",
        source=str(node.location),
        fix="use context_parallel='gather'",
    )


def _not_fused(axis: str, graph: Graph) -> ShardingConflict:
    """Says that a graph has no fused attention: where one is written out, or has
    dropout, which takes it apart, the place is told."""
    problem = (
        f"'{axis}' cannot pass keys and values round: the model has no fused attention"
    )
    scores = [n for n in graph.nodes if n.op in SOFTMAX and len(n.out.shape) > 2]
    if not scores:
        return ShardingConflict(problem, fix="use context_parallel='gather'")
    made = {scores[0].out.name}
    dropped = False
    for node in graph.nodes:
        if made & {v.name for v in node.operands}:
            dropped = dropped or node.op == "autopar.dropout"
            if bare(node.op) in ("masked_fill", "masked_fill_", "_to_copy", "to"):
                made |= {v.name for v in node.results}
    without = " with dropout_p=0.0" if dropped else ""
    return ShardingConflict(
        f"{problem}, but one in several operations{' with dropout' if dropped else ''}",
        source=str(scores[0].location),
        fix="use context_parallel='gather', or compute it by "
        f"F.scaled_dot_product_attention{without}",
    )
