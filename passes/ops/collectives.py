"""Collectives: what moves tensors between ranks, and what that is backwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ..graph import Node, Value
from ..mesh import Axes, as_axes
from ..ops.cotangents import Cotangents
from ..ops.op import Op, OutCotangents, Place

# How what is gathered varies, if it does not: its gradient is a mean over the ranks.
MEAN = "mean"


def _if_uneven(extent: int, axes: Axes, sizes: Mapping[str, int]) -> int | None:
    """The extent of a dim of which the ranks on some axes hold unlike shares, from
    which each knows that of all; None if they are equal."""
    return extent if extent % prod(sizes[a] for a in as_axes(axes)) else None


def gather_on_rank(at: Place, node: Node, local: Node) -> Node:
    """Adds the gathered dim's extent where ranks hold unequal shards, and if it
    varies."""
    axes, dim, varying = node.named("axes dim varying")
    whole = _if_uneven(local.out.shape[dim], axes, at.sizes)
    varying = varying or at.is_varying(node.out, axes)
    return replace(local, args=(*local.args[:3], whole, varying))


def exchange_on_rank(at: Place, node: Node, local: Node) -> Node:
    """Adds the joined dim's extent where ranks hold unequal shards."""
    axis, concat_dim = node.named("axes concat_dim")
    whole = _if_uneven(local.out.shape[concat_dim], axis, at.sizes)
    return replace(local, args=(*local.args, whole))


def same(_: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """P -> R: the cotangent of a pending sum is the cotangent of the sum."""
    return [dys[0]]


def enter(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """dx is the sum of dy over the axes: each rank used x for its own share."""
    x, axes = node.named("x axes")
    return [cts.emit("comm.all_reduce", x, node, dys[0], axes, "sum")]


def all_gather(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """dx is this rank's shard of dy, summed over ranks if they used y differently; or
    their mean, where they did not, but shards do not lie as rows do."""
    x, axis, dim, varying = node.named("x axes dim varying")
    op = "comm.reduce_scatter" if varying else "comm.shard"
    dx = cts.emit(op, x, node, dys[0], axis, dim)
    if varying == MEAN:
        parts = prod(cts.sizes[a] for a in as_axes(axis))
        dx = cts.emit("aten.mul.Tensor", x, node, dx, 1.0 / parts)
    return [dx]


def reduce_scatter(
    cts: Cotangents, node: Node, dys: OutCotangents
) -> list[Value | None]:
    """dx is dy gathered."""
    x, axis, dim = node.named("x axes dim")
    return [_gathered(cts, x, node, dys[0], axis, dim)]


def shard(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """dx is dy gathered; of a padded shard, dy among zeros."""
    x, axis, dim, pads = node.named("x axes dim pads")
    if pads:
        return [cts.emit("comm.pad", x, node, dys[0], axis, dim, x.shape[dim])]
    return [_gathered(cts, x, node, dys[0], axis, dim)]


def _gathered(
    cts: Cotangents, x: Value, node: Node, dy: Value | None, axis: Axes, dim: int
) -> Value:
    whole = _if_uneven(x.shape[dim], axis, cts.sizes)
    return cts.emit("comm.all_gather", x, node, dy, axis, dim, whole, False)


def all_to_all(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """dx is the exchange the other way round."""
    x, axis, split, joined = node.named("x axes split_dim concat_dim")
    whole = _if_uneven(x.shape[split], axis, cts.sizes)
    return [cts.emit(node.op, x, node, dys[0], axis, joined, split, whole)]


# --- Memory -------------------------------------------------------------------------
# What a rank packs for others, unless the tensor lies as they want it, and what comes
# from them; as over gloo, where the addends of a reduce-scatter arrive one by one.


def _packed(x: Value, dim: int) -> int:
    """Bytes of a copy of x in which the parts along dim follow each other."""
    return x.bytes if prod(x.shape[:dim]) > 1 else 0


def to_gather(node: Node) -> int:
    """Bytes of a copy of the result, if ranks' parts do not come out in place."""
    return _packed(node.out, node.arg("dim"))


def to_scatter(node: Node) -> int:
    """Bytes of the copy of the input that is reduced, and of one with ranks' parts in
    order."""
    x = node.operands[0]
    return x.bytes + _packed(x, node.arg("dim"))


def to_exchange(node: Node) -> int:
    """Bytes of copies with ranks' parts in order, of the input and of the result."""
    split, joined = node.named("split_dim concat_dim")
    return _packed(node.operands[0], split) + _packed(node.out, joined)


# What parameters and their gradients begin to move by, while something computes.
UNDER_WAY = {
    "comm.start_gather": ("xs axes dims wholes", "all_gather"),
    "comm.start_scatter": ("xs axes dims", "reduce_scatter"),
}
# What only speaks of others that are under way, or may be.
SPEAKS = {"comm.wait": "under_way", "comm.ready": "gradients", "comm.pause": "values"}
OPS = (
    Op("comm.loss_scale", "shape dtype"),
    Op("comm.enter", "x axes", derivative=enter),
    Op("comm.all_reduce", "x axes reduction", kind="all_reduce", derivative=same),
    Op(
        "comm.all_gather",
        "x axes dim whole varying",
        kind="all_gather",
        workspace=to_gather,
        on_rank=gather_on_rank,
        derivative=all_gather,
        called_with=4,
    ),
    Op(
        "comm.reduce_scatter",
        "x axes dim",
        kind="reduce_scatter",
        workspace=to_scatter,
        derivative=reduce_scatter,
    ),
    *(Op(name, heeds, kind=kind) for name, (heeds, kind) in UNDER_WAY.items()),
    *(Op(name, heeds) for name, heeds in SPEAKS.items()),
    Op("comm.shard", "x axes dim pads", derivative=shard, called_with=3),
    Op("comm.pad", "x axes dim whole"),
    Op(
        "comm.all_to_all",
        "x axes split_dim concat_dim whole",
        kind="all_to_all",
        workspace=to_exchange,
        on_rank=exchange_on_rank,
        derivative=all_to_all,
    ),
)
