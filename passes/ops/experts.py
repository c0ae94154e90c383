"""Products of rows with the weights of the experts that they chose, and the ways that
rows take to their experts and home (`passes.shard.routed`)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..graph import Node, Value
from ..ops.cotangents import Cotangents
from ..ops.lookups import local
from ..ops.op import Alternative, Op, OutCotangents, Place
from ..ops.products import by_columns, of_weight_grad

ROUTE, DISPATCH, COMBINE = "comm.route", "comm.dispatch", "comm.combine"
ROUTED = (ROUTE, DISPATCH, COMBINE)
PRODUCT, GROUPED = "autopar.expert_linear", "comm.grouped_linear"
ROWS, EXPERT, WEIGHT = range(3)  # operands of expert_linear
GROUP = "comm.group_rows"  # by the order that `passes.shard.sort_rows` gives them
PERMUTE, UNPERMUTE = "autopar.permute_rows", "autopar.unpermute_rows"


def expert_linear(x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
    """Multiplies each row by its expert's weight: x [s,k], expert [s], weight [e,n,k]
    -> [s,n]."""
    return expert_linear_from(0, x, expert, weight)


def expert_linear_from(start: int, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
    """x [n, in], expert [n], weight [experts, out, in] -> [n, out], 0 for experts that
    are elsewhere. start: the first expert here."""
    index, inside = local(expert, start, weight.shape[0])
    return (weight[index] @ x[..., None])[..., 0].where(inside[:, None], 0)


def on_rank(at: Place, node: Node, local: Node) -> Node:
    """Rows look their expert up by its global number."""
    weight = node.arg("weight")
    args = (*local.args, weight.shape[0], at.axes_of(weight, 0))
    return replace(local, op="comm.expert_linear", args=args)


def derivative(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """y = x w[expert]^T: dx = dy w[expert], dw[expert] += dy^T x."""
    x, expert, w, experts, axes = node.named("x expert weight experts axes")
    args = (dys[0], x, expert, experts, axes)
    dw = cts.to_weight(w, "comm.expert_weight_grad_", node, *args)
    if not cts.wanted(x):
        return [None, None, dw]
    back = "comm.expert_linear_transposed"
    return [cts.emit(back, x, node, dys[0], expert, w, experts, axes), None, dw]


def home_again(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """Gradients of rows go home as the rows came, or to their experts again."""
    back = COMBINE if node.op == DISPATCH else DISPATCH
    x, *how = node.named("x axes order counts")
    return [cts.emit(back, x, node, dys[0], *how), None, None]


def grouped(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """The same of rows that lie together."""
    x, w, ends = node.named("x weight ends")
    dw = cts.to_weight(w, "comm.grouped_weight_grad_", node, dys[0], x, ends)
    back = "comm.grouped_linear_transposed"
    dx = cts.emit(back, x, node, dys[0], w, ends) if cts.wanted(x) else None
    return [dx, dw, None]


def back_in_order(
    cts: Cotangents, node: Node, dys: OutCotangents
) -> list[Value | None]:
    """Gradients of rows lie as the rows do."""
    back = UNPERMUTE if node.op == PERMUTE else PERMUTE
    x, places = node.named("x places")
    return [cts.emit(back, x, node, dys[0], places), None]


def rows(node: Node) -> int:
    """Rows in the order in which they leave, or arrive."""
    return node.operands[0].bytes


OPS = (
    Op(
        PRODUCT,
        "x expert weight",
        "s k+, s, e@ n k+ -> s n",
        "(x(b, c), ints(b), x(a, d, c))",
        (Alternative("routed", (ROWS, 0), ((WEIGHT, 0),), "batch"),),
        is_product=True,
        flops=by_columns,
        weights="weight",
        on_rank=on_rank,
        formula=expert_linear,
        on_shard=expert_linear_from,
    ),
    Op(
        "comm.expert_linear",
        "x expert weight experts axes",
        flops=by_columns,
        weights="weight",
        derivative=derivative,
    ),
    Op(
        "comm.expert_linear_transposed",
        "dy expert weight experts axes",
        flops=by_columns,
    ),
    Op(
        "comm.expert_weight_grad_",
        "into dy x expert experts axes",
        flops=of_weight_grad,
    ),
    Op(GROUP, "expert experts axes", workspace=rows),
    *(Op(name, "x places", derivative=back_in_order) for name in (PERMUTE, UNPERMUTE)),
    Op(
        GROUPED,
        "x weight ends",
        flops=by_columns,
        weights="weight",
        is_product=True,
        derivative=grouped,
    ),
    Op("comm.grouped_linear_transposed", "dy weight ends", flops=by_columns),
    Op("comm.grouped_weight_grad_", "into dy x ends", flops=of_weight_grad),
    Op(ROUTE, "expert axes experts", kind="all_to_all", workspace=rows),
    *(
        Op(
            name,
            "x axes order counts",
            kind="all_to_all",
            workspace=rows,
            derivative=home_again,
        )
        for name in (DISPATCH, COMBINE)
    ),
)
