"""The derivative of every op, as nodes.

Ops with a kernel of their own, collectives and views have a line in `DERIVATIVES`; any
other op is differentiated by tracing autograd through it, see
`passes.stage.traced_vjp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from passes.graph import Node, Value
from passes.mesh import Axes, as_axes, balanced, nested
from passes.shard.ring import ATTENTION
from passes.shard.routed import COMBINE, DISPATCH
from passes.stage.tape import Tape
from passes.stage.traced_vjp import traced

# node, cotangents of its outs (None where nothing flows back) -> of its operands
Derivative = Callable[[Tape, Node, Sequence[Value | None]], list[Value | None]]


def forward_nodes(tape: Tape, node: Node) -> Node | None:
    """The node to run forward instead, if the derivative needs more results of it."""
    if node.op in ("autopar.attention", ATTENTION):
        q, out = node.operands[0], node.out
        lse = tape.builder.value("lse", q.shape[:-1], torch.float32)
        return replace(node, outs=(out, lse))
    return None


def same(_: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    """P -> R: the cotangent of a pending sum is the cotangent of the sum."""
    return [dys[0]]


def add(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    dy = dys[0]
    assert dy is not None
    grads: list[Value | None] = []
    for v in node.operands:
        if v.shape == dy.shape and tape.wanted(v):
            grads.append(tape.cast(dy, v, node))
        else:
            grads.append(tape.to_bias(v, dy, node))
    if sum(g is dy for g in grads) > 1:
        tape.share(dy)
    return grads


def cast(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    dy = dys[0]
    return [None if dy is None else tape.cast(dy, node.operands[0], node)]


def reshape(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    return [tape.view("aten.reshape.default", dys[0], node.operands[0], node)]


def transpose(
    tape: Tape, node: Node, dys: Sequence[Value | None]
) -> list[Value | None]:
    return [tape.view(node.op, dys[0], node.operands[0], node, *node.args[1:])]


def permute(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    order = [0] * len(node.args[1])
    for new, old in enumerate(node.args[1]):
        order[old] = new
    return [tape.view(node.op, dys[0], node.operands[0], node, tuple(order))]


def split(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    x = node.operands[0]
    dim = int(node.arg("dim"))
    pieces = []
    for out, dy in zip(node.outs, dys, strict=True):
        assert out is not None
        pieces.append(dy if dy is not None else tape.zeros(out, node))
    return [tape.emit("aten.cat.default", x, node, tuple(pieces), dim)]


def linear(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    """y = x w^T (+ b): dx = dy w, dw = dy^T x, db = sum dy."""
    x, dy = node.operands[0], dys[0]
    to_weight = ("autopar.linear_weight_grad_", dy, x)
    return _product(tape, node, dy, "aten.matmul.default", to_weight)


def affine(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    """y = x w (+ b): dx = dy w^T, dw = x^T dy, db = sum dy."""
    x, dy = node.operands[0], dys[0]
    to_weight = ("autopar.matmul_weight_grad_", x, dy)
    return _product(tape, node, dy, "aten.linear.default", to_weight)


def _product(
    tape: Tape, node: Node, dy: Value | None, to_input: str, to_weight: tuple[Any, ...]
) -> list[Value | None]:
    assert dy is not None
    x, w, *bias = node.operands
    dx = dw = None
    if tape.is_param(w):
        tape.accumulate(w, to_weight[0], node, *to_weight[1:])
    elif tape.wanted(w):
        dw = tape.zeros(w, node)
        tape.append(Node(to_weight[0], (dw, *to_weight[1:]), {}, (), node.where))
    d_bias = [tape.to_bias(b, dy, node) for b in bias]
    if tape.wanted(x):
        dx = tape.emit(to_input, x, node, dy, w)
    return [dx, dw, *d_bias]


def matmul(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    if len(node.operands[1].shape) == 2 and len(node.operands[0].shape) > 1:
        return affine(tape, node, dys)
    return traced(tape, node, dys)


def attention(
    tape: Tape, node: Node, dys: Sequence[Value | None]
) -> list[Value | None]:
    q, k, v, *others = node.args
    dq, dk, dv = (tape.fresh(x) for x in (q, k, v))
    args = (dys[0], q, k, v, *node.outs, *others)
    op = f"{node.op}_backward"
    tape.append(Node(op, args, node.kwargs, (dq, dk, dv), node.where))
    return [dq, dk, dv] + [None] * (len(node.operands) - 3)


def embedding(
    tape: Tape, node: Node, dys: Sequence[Value | None]
) -> list[Value | None]:
    table, ids = node.args[:2]
    if tape.is_param(table):
        padding = node.arg("padding_idx")
        padding = None if padding == -1 else padding
        tape.accumulate(table, "autopar.embedding_grad_", node, dys[0], ids, padding)
        return [None, None]
    return traced(tape, node, dys)


def lookup(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    table, ids, rows, axes, padding = node.args
    args = (dys[0], ids, rows, axes, padding)
    if tape.is_param(table):
        tape.accumulate(table, "comm.lookup_grad_", node, *args)
        return [None, None]
    dw = tape.zeros(table, node)
    tape.append(Node("comm.lookup_grad_", (dw, *args), {}, (), node.where))
    return [dw, None]


def pick(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    x, index, _, extent, axes = node.args
    tape.add_in_place(x, "comm.pick_backward_add_", node, dys[0], index, extent, axes)
    return [None, None]


def expert_linear(
    tape: Tape, node: Node, dys: Sequence[Value | None]
) -> list[Value | None]:
    """y = x w[expert]^T: dx = dy w[expert], dw[expert] += dy^T x."""
    x, expert, w, experts, axes = node.args
    op, args = "comm.expert_weight_grad_", (dys[0], x, expert, experts, axes)
    dx = dw = None
    if tape.is_param(w):
        tape.accumulate(w, op, node, *args)
    elif tape.wanted(w):
        dw = tape.zeros(w, node)
        tape.append(Node(op, (dw, *args), {}, (), node.where))
    if tape.wanted(x):
        back = "comm.expert_linear_transposed"
        dx = tape.emit(back, x, node, dys[0], expert, w, experts, axes)
    return [dx, None, dw]


def sum_exp(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    x, m = node.args
    return [tape.emit("autopar.sum_exp_backward", x, node, dys[0], x, m), None]


def masked_scale(
    tape: Tape, node: Node, dys: Sequence[Value | None]
) -> list[Value | None]:
    x, keep, scale = node.args
    return [tape.emit(node.op, x, node, dys[0], keep, scale), None]


def enter(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    x, axes = node.args
    return [tape.emit("comm.all_reduce", x, node, dys[0], axes, "sum")]


def all_gather(
    tape: Tape, node: Node, dys: Sequence[Value | None]
) -> list[Value | None]:
    x, axis, dim, _, varying = node.args
    op = "comm.reduce_scatter" if varying else "comm.shard"
    return [tape.emit(op, x, node, dys[0], axis, dim)]


def reduce_scatter(
    tape: Tape, node: Node, dys: Sequence[Value | None]
) -> list[Value | None]:
    x, axis, dim = node.args
    return [_gathered(tape, x, node, dys[0], axis, dim)]


def shard(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    x, axis, dim, pads = node.args
    if pads:
        return [tape.emit("comm.pad", x, node, dys[0], axis, dim, x.shape[dim])]
    return [_gathered(tape, x, node, dys[0], axis, dim)]


def _gathered(
    tape: Tape, x: Value, node: Node, dy: Value | None, axis: Axes, dim: int
) -> Value:
    shares = nested(x.shape[dim], (tape.sizes[a] for a in as_axes(axis)))
    sizes = None if len(set(shares)) == 1 else shares
    return tape.emit("comm.all_gather", x, node, dy, axis, dim, sizes, False)


def all_to_all(
    tape: Tape, node: Node, dys: Sequence[Value | None]
) -> list[Value | None]:
    x, axis, split_dim, concat_dim, _ = node.args
    shares = balanced(x.shape[split_dim], tape.sizes[axis])
    sizes = None if len(set(shares)) == 1 else shares
    return [tape.emit(node.op, x, node, dys[0], axis, concat_dim, split_dim, sizes)]


def to_experts(
    tape: Tape, node: Node, dys: Sequence[Value | None]
) -> list[Value | None]:
    """Gradients of rows go home as the rows came, or to their experts again."""
    back = COMBINE if node.op == DISPATCH else DISPATCH
    return [tape.emit(back, node.operands[0], node, dys[0], *node.args[1:]), None, None]


DERIVATIVES: dict[str, Derivative] = {
    "aten.add.Tensor": add,
    "aten.to.dtype": cast,
    "aten.reshape.default": reshape,
    "aten.transpose.int": transpose,
    "aten.permute.default": permute,
    "aten.split.Tensor": split,
    "aten.linear.default": linear,
    "aten.matmul.default": matmul,
    "aten.embedding.default": embedding,
    "autopar.affine": affine,
    "autopar.attention": attention,
    ATTENTION: attention,
    "autopar.sum_exp": sum_exp,
    "autopar.masked_scale": masked_scale,
    "comm.lookup": lookup,
    "comm.pick": pick,
    "comm.expert_linear": expert_linear,
    "comm.enter": enter,
    "comm.all_reduce": same,
    "comm.all_gather": all_gather,
    "comm.reduce_scatter": reduce_scatter,
    "comm.shard": shard,
    "comm.all_to_all": all_to_all,
    DISPATCH: to_experts,
    COMBINE: to_experts,
}
