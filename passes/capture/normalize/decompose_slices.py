"""Slices: what is written into one, or cut out of what was just joined.

`y = torch.empty_like(x); y[..., :n] = a; y[..., n:] = b` is cat([a, b], -1).
"""

from __future__ import annotations

from ...graph import Node, Value
from ...ops.parts import is_comb
from ...rewrite import Rewriter, Rule

FILLED = ("aten.zeros", "aten.ones", "aten.full")


def slice_(rewriter: Rewriter, node: Node) -> Value | None:
    """All of a tensor is the tensor; every second element is the first (or second) of
    each pair; a slice of joined pieces is some of them, where it begins and ends as
    they do."""
    x, dim, start, end, step = bounds(node, node.operands[0])
    if node.out.shape == x.shape:
        return x
    if is_comb(x.shape[dim], start, end, step):
        x = comb(rewriter, x, dim, step)
        return rewriter.like(node, "aten.select.int", x, dim + 1, start)
    joined = rewriter.producer(x, "aten.cat")
    if joined is None or step != 1:
        return None
    along = joined.arg("dim")
    if along % len(x.shape) != dim:
        return None
    place, inside = 0, []
    for piece in joined.operands:
        if start <= place and place + piece.shape[dim] <= end:
            inside.append(piece)
        place += piece.shape[dim]
    if sum(piece.shape[dim] for piece in inside) != end - start:
        return None
    return join(rewriter, inside, dim)


def narrow(rewriter: Rewriter, node: Node) -> Value:
    """`narrow` by another name."""
    x, dim, start, length = node.named("self dim start length")
    start %= max(1, x.shape[dim])
    if length == x.shape[dim]:
        return x
    return rewriter.like(node, "aten.slice.Tensor", x, dim, start, start + length)


def slice_scatter(rewriter: Rewriter, node: Node) -> Value | None:
    """x with a slice replaced -> cat of what is before, the new part, what is after."""
    base, part = node.operands
    _, dim, start, end, step = bounds(node, base)
    if base.shape == part.shape:
        return part
    base = spread(rewriter, base)
    if is_comb(base.shape[dim], start, end, step):
        apart = comb(rewriter, base, dim, step)
        shape = (*part.shape[: dim + 1], 1, *part.shape[dim + 1 :])
        part = rewriter.reshape(part, shape)
        apart = around(rewriter, apart, part, dim + 1, start, start + 1)
        return rewriter.reshape(apart, base.shape)
    if step != 1:
        return rewriter.again(node, self=base, src=part)
    return around(rewriter, base, part, dim, start, end)


def comb(rewriter: Rewriter, x: Value, dim: int, step: int) -> Value:
    """[.., n step, ..] -> [.., n, step, ..]."""
    shape = (*x.shape[:dim], x.shape[dim] // step, step, *x.shape[dim + 1 :])
    return rewriter.reshape(x, shape)


def select_scatter(rewriter: Rewriter, node: Node) -> Value:
    """x with one of its rows replaced."""
    base, part = node.operands
    dim = node.arg("dim") % len(base.shape)
    index = node.arg("index") % base.shape[dim]
    shape = (*base.shape[:dim], 1, *base.shape[dim + 1 :])
    part = rewriter.reshape(part, shape)
    base = spread(rewriter, base)
    return around(rewriter, base, part, dim, index, index + 1)


def around(
    rewriter: Rewriter, base: Value, part: Value, dim: int, start: int, end: int
) -> Value:
    """cat of base[:start], part and base[end:] along a dim."""
    pieces = []
    for first, last in ((0, start), (start, end), (end, base.shape[dim])):
        if first == start and last == end:
            pieces.append(part)
        elif first < last:
            pieces.append(cut(rewriter, base, dim, first, last))
    return join(rewriter, pieces, dim)


def cut(rewriter: Rewriter, x: Value, dim: int, start: int, end: int) -> Value:
    """Rows of x along a dim, from start to end."""
    like = Value("", (*x.shape[:dim], end - start, *x.shape[dim + 1 :]), x.dtype)
    args = (x, dim, start, end)
    node = Node("aten.slice.Tensor", args, {}, (like,), rewriter.where)
    return slice_(rewriter, node) or rewriter.emit(node.op, *args)


def join(rewriter: Rewriter, pieces: list[Value], dim: int) -> Value:
    """cat of pieces along a dim; a lone piece is the whole."""
    if len(pieces) == 1:
        return pieces[0]
    return rewriter.emit("aten.cat.default", tuple(pieces), dim)


def spread(rewriter: Rewriter, x: Value) -> Value:
    """A tensor of one value as that value seen many times, so that nobody holds all."""
    node = rewriter.producer(x, *FILLED)
    if node is None or x.numel == 1:
        return x
    ones = (1,) * len(x.shape)
    one = node.with_args(size=ones, dtype=x.dtype)
    value = rewriter.emit(one.op, *one.args, **one.kwargs)
    return rewriter.expand(value, x.shape)


def copy(rewriter: Rewriter, node: Node) -> Value:
    """copy -> the source, in the shape and precision of the tensor overwritten."""
    x, out = node.operands[1], node.out
    if x.dtype != out.dtype:
        x = rewriter.emit("aten.to.dtype", x, out.dtype)
    return rewriter.expand(x, out.shape)


def bounds(node: Node, x: Value) -> tuple[Value, int, int, int, int]:
    """The tensor, dim, start, end and step of a slice, none of them negative."""
    dim = node.arg("dim") % len(x.shape)
    cut = slice(*node.named("start end step"))
    return (x, dim, *cut.indices(x.shape[dim]))


SLICE_RULES: dict[str, Rule] = {
    "aten.slice": slice_,
    "aten.narrow": narrow,
    "aten.slice_scatter": slice_scatter,
    "aten.select_scatter": select_scatter,
    "aten.copy": copy,
}
