"""The derivative of every op, as nodes.

Ops with a kernel of their own, collectives and views have a line in `DERIVATIVES`; any
other op is differentiated by tracing autograd through it once per distinct signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from passes.cost import VIEWS
from passes.errors import CaptureError
from passes.graph import Node, Value, map_values, resolve
from passes.mesh import balanced
from passes.tape import Tape

# node, cotangents of its outs (None where nothing flows back) -> of its operands
Derivative = Callable[[Tape, Node, Sequence[Value | None]], list[Value | None]]


def forward_nodes(tape: Tape, node: Node) -> Node | None:
    """The node to run forward instead, if the derivative needs more results of it."""
    if node.op == "autopar.attention":
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
    grads = [
        dy if v.shape == dy.shape and tape.wanted(v) else tape.to_bias(v, dy, node)
        for v in node.operands
    ]
    if sum(g is dy for g in grads) > 1:
        tape.share(dy)
    return grads


def reshape(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    return [tape.view("aten.reshape.default", dys[0], node.operands[0], node, True)]


def transpose(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    return [tape.view(node.op, dys[0], node.operands[0], node, *node.args[1:])]


def permute(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    order = [0] * len(node.args[1])
    for new, old in enumerate(node.args[1]):
        order[old] = new
    return [tape.view(node.op, dys[0], node.operands[0], node, tuple(order))]


def split(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    x = node.operands[0]
    dim = int(node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0))
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


def attention(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    q, k, v, mask, is_causal, scale = node.args
    out, lse = node.outs
    dq, dk, dv = (tape.fresh(x) for x in (q, k, v))
    args = (dys[0], q, k, v, out, lse, mask, is_causal, scale)
    tape.append(Node("autopar.attention_backward", args, {}, (dq, dk, dv), node.where))
    return [dq, dk, dv] + [None] * (len(node.operands) - 3)


def embedding(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    table, ids = node.args[:2]
    if tape.is_param(table):
        padding = node.args[2] if len(node.args) > 2 else None
        padding = None if padding in (None, -1) else padding
        tape.accumulate(
            table, "autopar.embedding_grad_", node, dys[0], ids, padding
        )
        return [None, None]
    return traced(tape, node, dys)


def lookup(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    table, ids, rows, axes = node.args
    args = (dys[0], ids, rows, axes)
    if tape.is_param(table):
        tape.accumulate(table, "comm.lookup_grad_", node, *args)
        return [None, None]
    dw = tape.zeros(table, node)
    tape.append(Node("comm.lookup_grad_", (dw, *args), {}, (), node.where))
    return [dw, None]


def pick(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    x, index, extent, axes = node.args
    tape.add_in_place(x, "comm.pick_backward_add_", node, dys[0], index, extent, axes)
    return [None, None]


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


def all_gather(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
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
    tape: Tape, x: Value, node: Node, dy: Value | None, axis: str, dim: int
) -> Value:
    shares = balanced(x.shape[dim], tape.sizes[axis])
    sizes = None if len(set(shares)) == 1 else shares
    return tape.emit("comm.all_gather", x, node, dy, axis, dim, sizes, False)


def all_to_all(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    x, axis, split_dim, concat_dim, _ = node.args
    shares = balanced(x.shape[split_dim], tape.sizes[axis])
    sizes = None if len(set(shares)) == 1 else shares
    return [tape.emit(node.op, x, node, dys[0], axis, concat_dim, split_dim, sizes)]


DERIVATIVES: dict[str, Derivative] = {
    "aten.add.Tensor": add,
    "aten.reshape.default": reshape,
    "aten.transpose.int": transpose,
    "aten.permute.default": permute,
    "aten.split.Tensor": split,
    "aten.linear.default": linear,
    "aten.matmul.default": matmul,
    "aten.embedding.default": embedding,
    "autopar.affine": affine,
    "autopar.attention": attention,
    "autopar.sum_exp": sum_exp,
    "autopar.masked_scale": masked_scale,
    "comm.lookup": lookup,
    "comm.pick": pick,
    "comm.enter": enter,
    "comm.all_reduce": same,
    "comm.all_gather": all_gather,
    "comm.reduce_scatter": reduce_scatter,
    "comm.shard": shard,
    "comm.all_to_all": all_to_all,
}


# --- Any other op: autograd, traced once -------------------------------------------


@dataclass(frozen=True)
class Template:
    """Forward and backward of one op over placeholder values.

    forward makes `outs` from `xs`; backward makes `grads` from these and `dys`.
    """

    xs: tuple[Value, ...]
    dys: tuple[Value | None, ...]
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    outs: tuple[Value | None, ...]
    grads: tuple[Value | None, ...]


def template_of(tape: Tape, node: Node) -> Template:
    """The template of a node's signature; traced once for all nodes that share it."""
    wanted = tuple(tape.wanted(v) for v in node.operands)
    places = iter(range(len(node.operands)))
    numbered = map_values(lambda _: _Operand(next(places)), (node.args, node.kwargs))
    args, kwargs = numbered
    types = tuple((v.shape, v.dtype) for v in node.operands)
    try:
        return _trace(node.op, args, tuple(kwargs.items()), types, wanted)
    except Exception as error:
        raise CaptureError(
            f"{node.op} cannot be differentiated: {type(error).__name__}: {error}",
            source=str(node.where),
            fix="detach what needs no gradient, or write it with other operations",
        ) from error


@dataclass(frozen=True)
class _Operand:
    index: int


def traced(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    """Instantiate the backward of a node whose template's forward ran before."""
    template = template_of(tape, node)
    bound = tape.bindings[node.results[0].name]
    for own, out, dy in zip(template.dys, node.outs, dys, strict=True):
        if own is not None and out is not None:
            bound[own.name] = dy if dy is not None else tape.zeros(out, node)
    named = {
        grad.name: v.name
        for grad, v in zip(template.grads, node.operands, strict=True)
        if grad is not None
    }
    for inner in template.backward:
        outs = tuple(
            None if v is None else tape.fresh(v, named.get(v.name, node.results[0].name))
            for v in inner.outs
        )
        new = replace(inner.substitute(lambda v: bound[v.name]), outs=outs)
        tape.append(replace(new, where=node.where))
        for old, fresh in zip(inner.outs, outs, strict=True):
            if old is not None and fresh is not None:
                bound[old.name] = fresh
                base = inner.op.rpartition(".")[0]
                if base in VIEWS or base == "aten.to":
                    tape.share(fresh)
    return [None if g is None else bound[g.name] for g in template.grads]


def expand_forward(tape: Tape, node: Node) -> list[Node]:
    """The forward nodes of a traced op, with the results that its backward keeps."""
    template = template_of(tape, node)
    bound = {x.name: v for x, v in zip(template.xs, node.operands, strict=True)}
    final = {
        t.name: v
        for t, v in zip(template.outs, node.outs, strict=True)
        if t is not None and v is not None
    }
    nodes = []
    for inner in template.forward:
        outs = tuple(
            None if v is None else final.get(v.name) or tape.kept(v, node)
            for v in inner.outs
        )
        new = replace(
            inner.substitute(lambda v: bound[v.name]), outs=outs, where=node.where
        )
        bound.update(
            (old.name, v)
            for old, v in zip(inner.outs, outs, strict=True)
            if old is not None and v is not None
        )
        nodes.append(new)
    tape.bindings[node.results[0].name] = bound
    return nodes


@lru_cache(maxsize=4096)
def _trace(
    op: str,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    types: tuple[tuple[tuple[int, ...], torch.dtype], ...],
    wanted: tuple[bool, ...],
) -> Template:
    def call(xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        def fill(arg: Any) -> Any:
            if isinstance(arg, _Operand):
                return xs[arg.index]
            return [fill(a) for a in arg] if isinstance(arg, tuple) else arg

        result = resolve(op)(*map(fill, args), **{k: fill(v) for k, v in kwargs})
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    def joint(xs: list[torch.Tensor], dys: list[torch.Tensor]) -> list[Any]:
        leaves = [
            x.detach().requires_grad_(w) for x, w in zip(xs, wanted, strict=True)
        ]
        with torch.enable_grad():
            outs = call(leaves)
        ends = [o for o, f in zip(outs, flows, strict=True) if f]
        sources = [x for x in leaves if x.requires_grad]
        return [*outs, *torch.autograd.grad(ends, sources, dys, allow_unused=True)]

    with FakeTensorMode():
        xs = [torch.empty(shape, dtype=dtype) for shape, dtype in types]
        outs = call(xs)
        flows = [o is not None and o.is_floating_point() for o in outs]
        dys = [
            torch.empty(o.shape, dtype=o.dtype)
            for o, flow in zip(outs, flows, strict=True)
            if flow and o is not None
        ]
        module = make_fx(joint)(xs, dys)
    return _read(module, wanted, flows)


def _read(
    module: fx.GraphModule, wanted: tuple[bool, ...], flows: list[bool]
) -> Template:
    """Read the traced graph, and sort its nodes into forward and backward."""
    values: dict[fx.Node, Any] = {}
    nodes: list[Node] = []
    sources: list[Value] = []
    results: list[Any] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            fake = node.meta["val"]
            values[node] = Value(node.name, tuple(fake.shape), fake.dtype)
            sources.append(values[node])
        elif node.op == "output":
            results = fx.map_arg(node.args[0], values.__getitem__)
        else:
            assert node.op == "call_function", f"the trace baked in {node.target}"
            values[node] = _read_call(node, values, nodes)
    outs, grads = results[: len(flows)], iter(results[len(flows) :])
    flowing = iter(sources[len(wanted) :])
    dys = tuple(next(flowing) if f else None for f in flows)
    all_grads = tuple(next(grads) if w else None for w in wanted)
    late = {v.name for v in dys if v is not None}
    forward, backward = [], []
    for n in nodes:
        if any(v.name in late for v in n.operands):
            late.update(v.name for v in n.results)
            backward.append(n)
        else:
            forward.append(n)
    backward = _only_needed(backward, {v.name for v in all_grads if v is not None})
    kept = {v.name for v in outs if v is not None} | _reads(backward)
    return Template(
        tuple(sources[: len(wanted)]),
        dys,
        tuple(_only_needed(forward, kept)),
        tuple(backward),
        tuple(outs),
        all_grads,
    )


def _reads(nodes: Sequence[Node]) -> set[str]:
    return {v.name for n in nodes for v in n.operands}


def _only_needed(nodes: Sequence[Node], needed: set[str]) -> list[Node]:
    kept, needed = [], set(needed)
    for node in reversed(nodes):
        if any(v.name in needed for v in node.results):
            outs = tuple(
                v if v is not None and v.name in needed else None for v in node.outs
            )
            kept.append(replace(node, outs=outs))
            needed.update(v.name for v in node.operands)
    return kept[::-1]


def _read_call(node: fx.Node, values: dict[fx.Node, Any], nodes: list[Node]) -> Any:
    args = fx.map_arg(node.args, values.__getitem__)
    if getattr(node.target, "__name__", "") == "getitem":
        return args[0][args[1]]
    op = str(node.target)
    if op in ("aten.detach.default", "aten.alias.default"):
        return args[0]
    kwargs = {
        k: v
        for k, v in fx.map_arg(dict(node.kwargs), values.__getitem__).items()
        if k not in ("device", "pin_memory", "layout")
    }
    fakes = node.meta["val"]
    many = isinstance(fakes, tuple | list)
    outs = tuple(
        Value(f"{node.name}_{i}" if i else node.name, tuple(f.shape), f.dtype)
        if isinstance(f, torch.Tensor)
        else None
        for i, f in enumerate(fakes if many else (fakes,))
    )
    if op in ("aten.view.default", "aten._unsafe_view.default"):
        # A cotangent need not be contiguous as the traced one was.
        op = "aten.reshape.default"
    plain = map_values(lambda v: v, args)
    nodes.append(Node(op, plain, kwargs, outs))
    return outs if many else outs[0]
