"""normalize: one spelling for each thing that models write in many ways.

Afterwards there are no asserts, aliases, casts to the same type or dead nodes; every
view is `reshape`, every matrix product of a weight is `linear` (weight [n, k]) or
`matmul` (weight [k, n]) with its bias added apart; a causal mask is a flag; attention,
dropout and the loss are made of ops whose sharding rules are plain.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import torch

from ...builder import prune
from ...graph import Graph, Node, Value, bare
from ...ops import creation
from ...ops.arguments import arguments, refuse_unread
from ...ops.captured import RESHAPES
from ...ops.op import OPS
from ...ops.random import CHANCE, DRAW, DRAWN, draw_of, overload
from ...rewrite import Rewriter, Rule
from ...traced import Traced
from ..normalize.batch_samples import batch_samples
from ..normalize.chunk_loss import chunk_loss
from ..normalize.chunk_rows import chunk_rows
from ..normalize.counted_rows import COUNTED_RULES
from ..normalize.decompose_composites import COMPOSITE_RULES
from ..normalize.decompose_index import index
from ..normalize.decompose_index_put import index_put, masked_scatter
from ..normalize.decompose_slices import SLICE_RULES
from ..normalize.grouped_queries import repeat_interleave
from ..normalize.hoist_splits import hoist_splits
from ..normalize.join_samples import join_samples
from ..normalize.loss import LOSS_RULES
from ..normalize.normalize_attention import attention, emit_dropout
from ..normalize.recognize_experts import (
    PRODUCTS,
    choice,
    grouped_product,
    looked_up_bias,
    looked_up_einsum,
    looked_up_product,
)
from ..normalize.split_products import split_products
from ..normalize.sum_pieces import sum_of_pieces
from ..normalize.unsort_rows import unsort_rows

NESTED = 2  # pieces of pieces are cut too


def normalize(traced: Traced, loss_chunks: int = 1) -> Traced:
    """Bring the graph to its normal form. The loss stays the same function.

    loss_chunks: of how many chunks of positions it is the sum, see `chunk_loss`.
    Raises: CaptureError on what no pass would heed, see `passes.ops.arguments`;
    NotInChunks.
    """
    for node in traced.graph.nodes:
        refuse_unread(node)
    graph = Rewriter(traced.graph, traced.literals).run(CLEAN)
    graph = join_samples(graph, traced.literals)
    graph = unsort_rows(graph, traced.literals)
    for _ in range(NESTED):
        graph = hoist_splits(Rewriter(graph, traced.literals))
        graph = split_products(Rewriter(graph, traced.literals))
    graph = Rewriter(graph, traced.literals).run(MEANING)
    graph = chunk_rows(graph, traced.literals)
    graph = batch_samples(graph, traced.literals)
    graph = Rewriter(graph, traced.literals).run({"aten.sum": sum_of_pieces})
    graph = chunk_loss(graph, traced.literals, loss_chunks)
    graph = number(graph, CHANCE, ("autopar.choose",))
    literals = {v.name: traced.literals[v.name] for v in graph.constants}
    return replace(traced, graph=graph, literals=literals)


def identity(_: Rewriter, node: Node) -> Value:
    """Replaces the op by its first operand."""
    return node.operands[0]


def cast(rewriter: Rewriter, node: Node) -> Value:
    """`to` in its many forms: only the dtype matters, the device is the rank's own."""
    x, out = node.operands[0], node.out
    if x.dtype == out.dtype:
        return x
    return _before_widening(rewriter, x, out.dtype) or _cast(rewriter, x, out)


def _before_widening(rewriter: Rewriter, x: Value, dtype: torch.dtype) -> Value | None:
    """x in the dtype that it had before it was made wider, if nothing else reads it
    wide: autocast narrows what a model widened for its weights."""
    if not rewriter.is_read_once(x):
        return None
    if (view := rewriter.producer(x, "aten.reshape")) is not None:
        before = _before_widening(rewriter, view.operands[0], dtype)
        return None if before is None else rewriter.reshape(before, x.shape)
    if (wider := rewriter.producer(x, "aten.to")) is not None:
        before = wider.operands[0]
        exact = torch.promote_types(dtype, x.dtype) == x.dtype
        if before.dtype == dtype and dtype.is_floating_point and exact:
            return before
    return None


def _cast(rewriter: Rewriter, x: Value, out: Value) -> Value:
    """x in another precision; views and copies are made of the cast, so that views
    meet."""
    if (view := rewriter.producer(x, "aten.reshape")) is not None:
        return rewriter.reshape(_cast(rewriter, view.operands[0], out), x.shape)
    if (copies := rewriter.producer(x, "aten.expand")) is not None:
        return rewriter.expand(_cast(rewriter, copies.operands[0], out), x.shape)
    return rewriter.emit("aten.to.dtype", x, out.dtype, name=out.name)


def reshape(rewriter: Rewriter, node: Node) -> Value:
    """Writes a view as a reshape to the result's shape."""
    return rewriter.reshape(node.operands[0], node.out.shape)


def only_one(rewriter: Rewriter, node: Node) -> Value | None:
    """select of the one index of a dim that a view inserted -> the view's operand."""
    view = rewriter.producer(node.operands[0], "aten.reshape")
    x = view.operands[0] if view else node.operands[0]
    return x if x.shape == node.out.shape else None


def collapse(rewriter: Rewriter, node: Node) -> Value:
    """A view of a view is one view."""
    x = node.operands[0]
    while (inner := rewriter.producer(x, "aten.reshape")) is not None:
        x = inner.operands[0]
    return rewriter.reshape(x, node.out.shape)


def add_number(rewriter: Rewriter, node: Node) -> Value | None:
    """`x + 0`, as position ids are written when there is no cache, is x.

    A number added to a scalar becomes a value: where the scalar is a pending sum, each
    share of it takes its share of the number.
    """
    bound = arguments(node)
    x, other = bound["self"], bound["other"]
    if isinstance(other, Value) or bound["alpha"] != 1:
        return None
    if other == 0 and x.dtype == node.out.dtype:
        return x
    out = node.out
    if out.shape != () or not out.dtype.is_floating_point:
        return None
    number = rewriter.emit("aten.scalar_tensor.default", other, dtype=out.dtype)
    return rewriter.emit("aten.add.Tensor", x, number)


def unchanged(_: Rewriter, node: Node) -> Value | None:
    """expand, slice, repeat: of nothing, or of all."""
    x = node.operands[0]
    return x if x.shape == node.out.shape else None


def factory(rewriter: Rewriter, node: Node) -> tuple[Value | None, ...]:
    """Constants are made on the rank's own device."""
    dropped = ("device", "pin_memory", "layout")
    kwargs = {k: v for k, v in node.kwargs.items() if k not in dropped}
    kwargs.setdefault("dtype", node.out.dtype)
    return rewriter.keep(replace(node, kwargs=kwargs))


def new_factory(rewriter: Rewriter, node: Node) -> Value:
    """`x.new_ones(shape)` does not depend on x."""
    kind = bare(node.op).removeprefix("new_").removesuffix("_like")
    fill = (node.arg("fill_value"),) if kind == "full" else ()
    kind = "zeros" if kind == "empty" else kind
    shape, dtype = node.out.shape, node.out.dtype
    return rewriter.emit(f"aten.{kind}.default", shape, *fill, dtype=dtype)


def cat(rewriter: Rewriter, node: Node) -> Value | None:
    """cat -> without empty pieces (a fresh key/value cache), or its only piece."""
    pieces = tuple(v for v in node.operands if v.shape != (0,))
    if len(pieces) == 1:
        return cast(rewriter, replace(node, args=pieces))
    if len(pieces) == len(node.operands):
        return None
    return rewriter.like(node, node.op, pieces, node.arg("dim"))


def product(rewriter: Rewriter, node: Node) -> Value | None:
    """linear, addmm (as in Conv1D), mm -> a product without bias, plus the bias."""
    kind = bare(node.op)
    bias: Value | None = None
    if kind == "addmm":
        if node.kwargs:
            return None
        bias, x, weight = node.operands
    else:
        x, weight = node.operands[:2]
        bias = node.arg("bias")
    if len(weight.shape) == 1:
        return rewriter.like(node, "aten.matmul.default", x, weight)
    op = "aten.linear.default" if kind == "linear" else "aten.matmul.default"
    flattened = rewriter.producer(x, "aten.reshape")
    if flattened is not None and flattened.operands[0].shape[-1:] == x.shape[-1:]:
        x = flattened.operands[0]
    out = rewriter.emit(op, x, weight, name=kind)
    if bias is not None:
        out = rewriter.emit("aten.add.Tensor", out, bias, name="biased")
    return rewriter.reshape(out, node.out.shape)


def mean(rewriter: Rewriter, node: Node) -> Value | None:
    """A mean over samples is a sum, which may stay pending, times a constant.

    Samples are first, or in what is left of all dims; a mean along the last dim alone
    is a norm's. Sums of half precision are kept in float32, where they are in range.
    """
    bound = arguments(node)
    x, out = bound["self"], node.out
    rank, dims = len(x.shape), bound.get("dim") or ()
    dims = tuple(d % rank for d in dims) or tuple(range(rank))
    if len(dims) < rank and dims == (rank - 1,):
        return None
    half = out.dtype in (torch.float16, torch.bfloat16)
    wide = torch.float32 if half else out.dtype
    if x.dtype != wide:
        x = rewriter.emit("aten.to.dtype", x, wide)
    if len(dims) == rank and not out.shape:
        total = rewriter.emit("aten.sum.default", x)
    else:
        keep = bool(bound.get("keepdim", False))
        total = rewriter.emit("aten.sum.dim_IntList", x, dims, keep)
    share = 1.0 / max(1, math.prod(x.shape[d] for d in dims))
    averaged = rewriter.emit("aten.mul.Tensor", total, share, name="mean")
    return (
        rewriter.like(node, "aten.to.dtype", averaged, out.dtype) if half else averaged
    )


def dropout(rewriter: Rewriter, node: Node) -> Value:
    """A dropout that is on becomes ours: its mask does not depend on the plan."""
    x, p = node.operands[0], node.arg("p")
    if not node.arg("train") or p == 0.0:
        return x
    return emit_dropout(rewriter, x, p)


def draw(rewriter: Rewriter, node: Node) -> Value | None:
    """Random ops -> our draws, which do not depend on the plan, and plain steps."""
    drawn = draw_of(node.name, arguments(node))
    if drawn is None:
        return None
    out, dtype = node.out, drawn.dtype or node.out.dtype

    def apart(x: Value) -> Value:  # what is drawn has no derivative
        return rewriter.emit("aten.detach.default", x)

    like = next(iter(node.operands), None)
    if like is None or like.shape != out.shape:
        like = rewriter.emit("aten.zeros.default", out.shape, dtype=dtype)
    made = Value("", out.shape, dtype)
    x = rewriter.emit(DRAW, apart(like), drawn.kind, like=made, name="drawn")
    for op, operand in drawn.steps:
        other = apart(operand) if isinstance(operand, Value) else operand
        x = rewriter.emit(overload(op, operand), x, other)
    return x if x.dtype == out.dtype else _cast(rewriter, x, out)


def number(graph: Graph, *series: tuple[str, ...]) -> Graph:
    """Number the nodes of each series of ops in the order in which the model calls
    them; those that nobody reads are left out then."""
    first = {op: ops[0] for ops in series for op in ops}
    nodes, count = [], dict.fromkeys(first.values(), 0)
    for node in graph.nodes:
        if (op := first.get(node.op)) is not None:
            node = replace(node, args=(*node.args, count[op]))
            count[op] += 1
        nodes.append(node)
    return prune(replace(graph, nodes=tuple(nodes)))


def tanh_gelu(rewriter: Rewriter, node: Node) -> Value | None:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) -> gelu(x, "tanh").

    Hendrycks and Gimpel, arXiv 1606.08415, section 2.
    """
    for half, bracket in permutations(node.named("self other")):
        h = rewriter.producer(half, "aten.mul")
        b = rewriter.producer(bracket, "aten.add")
        t = rewriter.producer(b.arg("self"), "aten.tanh") if b else None
        scaled = rewriter.producer(t.arg("self"), "aten.mul") if t else None
        cubic = rewriter.producer(scaled.arg("self"), "aten.add") if scaled else None
        small = rewriter.producer(cubic.arg("other"), "aten.mul") if cubic else None
        power = rewriter.producer(small.arg("self"), "aten.pow") if small else None
        if not (h and b and scaled and cubic and small and power):
            continue
        x, inner = power.arg("self"), _uncast(rewriter, power.arg("self"))
        constants = (
            *(n.arg("other") for n in (h, b, scaled, small)),
            power.arg("exponent"),
        )
        wanted = (0.5, 1.0, math.sqrt(2 / math.pi), 0.044715, 3.0)
        plain = all(isinstance(c, int | float) for c in constants)
        others = tuple(_uncast(rewriter, n.arg("self")) for n in (h, cubic))
        same_x = others == (inner, inner) and not (cubic.kwargs or b.kwargs)
        if plain and same_x and all(map(math.isclose, constants, wanted)):
            return rewriter.emit("aten.gelu.default", x, approximate="tanh")
    return None


def _uncast(rewriter: Rewriter, x: Value) -> Value:
    """The operand of the cast that makes x; x, if none does."""
    cast_node = rewriter.producer(x, "aten.to")
    return cast_node.operands[0] if cast_node else x


CLEAN: dict[str, Rule] = {
    **{
        name: cast if op.elements == "cast" else identity
        for name, op in OPS.items()
        if op.stays and op.view != "same"
    },
    **dict.fromkeys(RESHAPES, reshape),
    **{
        op.name: new_factory if op.heeds.startswith("self ") else factory
        for op in creation.OPS
        if "dtype" in op.heeds.split()
    },
    "aten.expand": unchanged,
    **SLICE_RULES,
    **COUNTED_RULES,
    **COMPOSITE_RULES,
    "aten.cat": cat,
    "aten.dropout": dropout,
    **dict.fromkeys(DRAWN, draw),
    "aten.repeat_interleave": repeat_interleave,
    "aten.linear": product,
    "aten.addmm": product,
    "aten.mm": product,
}

MEANING: dict[str, Rule] = {
    "aten.reshape": collapse,
    "aten.select": only_one,
    "aten.add": lambda rewriter, node: (
        looked_up_bias(rewriter, node) or add_number(rewriter, node)
    ),
    **dict.fromkeys(("aten.bmm", "aten.matmul"), looked_up_product),
    "aten.einsum": looked_up_einsum,
    **dict.fromkeys(PRODUCTS, grouped_product),
    "aten.topk": choice,
    "aten.index": index,
    "aten.index_put": index_put,
    "aten.masked_scatter": masked_scatter,
    "aten.mul": tanh_gelu,
    "aten.mean": mean,
    "aten.scaled_dot_product_attention": attention,
    **LOSS_RULES,
}
