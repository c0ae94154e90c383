"""sum_pieces: what is joined and then summed is summed before.

    logits = [head(h) for h in hidden.split(128, dim=1)]       chunks of positions
    nll = [cross_entropy(x.flatten(0, 1), y, reduction="none") for x, y in ...]
    torch.cat(nll).sum()          the rows of a chunk are those of all samples

Joined, these rows are in no order of samples, so that microbatches and ranks cannot
share them out; those of each chunk they can.
"""

from __future__ import annotations

from ...graph import Node, Value
from ...ops.arguments import arguments
from ...rewrite import Rewriter


def sum_of_pieces(rewriter: Rewriter, node: Node) -> Value | None:
    """sum(cat([x, y])) -> sum(x) + sum(y), if it goes along the dim of the cat."""
    joined = rewriter.producer(node.operands[0], "aten.cat")
    if joined is None:
        return None
    rank = len(joined.out.shape)
    dims = arguments(node).get("dim")
    summed = {d % rank for d in dims} if dims else {*range(rank)}
    kept = all(v.dtype == joined.out.dtype for v in joined.operands)
    if joined.arg("dim") % rank not in summed or not kept:
        return None
    first, *others = (
        rewriter.emit(node.op, piece, *node.args[1:], like=node.out, **node.kwargs)
        for piece in joined.operands
    )
    for other in others:
        first = rewriter.emit("aten.add.Tensor", first, other, name="summed")
    return first
