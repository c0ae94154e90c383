"""Parts of tensors: what is written into a part, or cut out of what was just joined.

`y = torch.empty_like(x); y[..., :n] = a; y[..., n:] = b` is cat([a, b], -1).
"""

from __future__ import annotations

from dataclasses import replace

from passes.capture.rewrite import Rewriter, Rule
from passes.graph import Node, Value, Where

FILLED = ("aten.zeros", "aten.ones", "aten.full")


def slice_(rewriter: Rewriter, node: Node) -> Value | None:
    """All of a tensor is the tensor; a slice of joined pieces is some of them, where it
    begins and ends as they do."""
    x, dim, start, end, step = bounds(node, node.operands[0])
    if node.out.shape == x.shape:
        return x
    joined = rewriter.producer(x, "aten.cat")
    if joined is None or step != 1:
        return None
    along = joined.kwargs.get("dim", [*joined.args, 0][1])
    if along % len(x.shape) != dim:
        return None
    place, found = 0, []
    for piece in joined.operands:
        if start <= place and place + piece.shape[dim] <= end:
            found.append(piece)
        place += piece.shape[dim]
    if sum(piece.shape[dim] for piece in found) != end - start:
        return None
    return join(rewriter, found, dim, node.where)


def slice_scatter(rewriter: Rewriter, node: Node) -> Value | None:
    """x with a slice of it replaced: what is before it, the new part, what is after."""
    base, part = node.operands
    cut = replace(node, args=(base, *node.args[2:]))
    _, dim, start, end, step = bounds(cut, base)
    if base.shape == part.shape:
        return part
    base = spread(rewriter, base, node.where)
    if step != 1:
        return rewriter.emit(
            node.op,
            base,
            part,
            *node.args[2:],
            shape=base.shape,
            dtype=base.dtype,
            where=node.where,
        )
    return around(rewriter, base, part, dim, start, end, node.where)


def select_scatter(rewriter: Rewriter, node: Node) -> Value:
    """x with one of its rows replaced."""
    base, part = node.operands
    dim, index = (int(a) for a in node.args[2:])
    dim, index = dim % len(base.shape), index % base.shape[dim]
    shape = (*base.shape[:dim], 1, *base.shape[dim + 1 :])
    part = rewriter.reshape(part, shape, node.where)
    base = spread(rewriter, base, node.where)
    return around(rewriter, base, part, dim, index, index + 1, node.where)


def around(
    rewriter: Rewriter,
    base: Value,
    part: Value,
    dim: int,
    start: int,
    end: int,
    where: Where,
) -> Value:
    """cat of base[:start], part and base[end:] along a dim."""
    pieces = []
    for first, last in ((0, start), (start, end), (end, base.shape[dim])):
        if first == start and last == end:
            pieces.append(part)
        elif first < last:
            shape = (*base.shape[:dim], last - first, *base.shape[dim + 1 :])
            cut = Node(
                "aten.slice.Tensor",
                (base, dim, first, last),
                {},
                (Value("", shape, base.dtype),),
                where,
            )
            pieces.append(
                slice_(rewriter, cut)
                or rewriter.emit(
                    cut.op, *cut.args, shape=shape, dtype=base.dtype, where=where
                )
            )
    return join(rewriter, pieces, dim, where)


def join(rewriter: Rewriter, pieces: list[Value], dim: int, where: Where) -> Value:
    """cat of pieces along a dim; a lone piece is the whole."""
    if len(pieces) == 1:
        return pieces[0]
    first = pieces[0]
    extent = sum(piece.shape[dim] for piece in pieces)
    shape = (*first.shape[:dim], extent, *first.shape[dim + 1 :])
    return rewriter.emit(
        "aten.cat.default",
        tuple(pieces),
        dim,
        shape=shape,
        dtype=first.dtype,
        where=where,
    )


def spread(rewriter: Rewriter, x: Value, where: Where) -> Value:
    """A tensor of one value as that value seen many times, so that nobody holds all."""
    node = rewriter.producer(x, *FILLED)
    if node is None or x.numel == 1:
        return x
    ones = (1,) * len(x.shape)
    kind = node.op.split(".")[1]
    value = rewriter.factory(
        kind, ones, *node.args[1:], shape=ones, dtype=x.dtype, where=where
    )
    return rewriter.emit(
        "aten.expand.default", value, x.shape, shape=x.shape, dtype=x.dtype, where=where
    )


def copy(rewriter: Rewriter, node: Node) -> Value:
    """What is copied over a tensor takes its place, in its shape and precision."""
    x, out, where = node.operands[1], node.out, node.where
    if x.dtype != out.dtype:
        x = rewriter.emit(
            "aten.to.dtype", x, out.dtype, shape=x.shape, dtype=out.dtype, where=where
        )
    if x.shape == out.shape:
        return x
    return rewriter.emit(
        "aten.expand.default", x, out.shape, shape=out.shape, dtype=x.dtype, where=where
    )


def bounds(node: Node, x: Value) -> tuple[Value, int, int, int, int]:
    """The tensor, dim, start, end and step of a slice, none of them negative."""
    given = dict(zip(("dim", "start", "end", "step"), node.args[1:], strict=False))
    given |= node.kwargs
    dim = given.get("dim", 0) % len(x.shape)
    start, end, step = given.get("start"), given.get("end"), given.get("step", 1)
    return (x, dim, *slice(start, end, step).indices(x.shape[dim]))


def tensor_split(rewriter: Rewriter, node: Node) -> tuple[Value | None, ...] | None:
    """`tensor_split` with other arguments is `split_with_sizes`."""
    x = node.operands[0]
    given = node.args[2] if len(node.args) > 2 else 0
    dim = int(node.kwargs.get("dim", given)) % len(x.shape)
    sizes = tuple(v.shape[dim] if v else 0 for v in node.outs)
    op, args = "aten.split_with_sizes.default", (x, sizes, dim)
    return rewriter.keep(replace(node, op=op, args=args, kwargs={}))


def glu(rewriter: Rewriter, node: Node) -> Value:
    """The first half times the sigmoid of the second."""
    x, out = node.operands[0], node.out
    dim = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1))
    dim %= len(x.shape)
    halves = tuple(Value(f"half_{i}", out.shape, x.dtype) for i in range(2))
    args = (x, (out.shape[dim],) * 2, dim)
    first, second = rewriter.keep(
        Node("aten.split_with_sizes.default", args, {}, halves, node.where)
    )
    like = {"shape": out.shape, "dtype": out.dtype, "where": node.where}
    gate = rewriter.emit("aten.sigmoid.default", second, **like)
    return rewriter.emit("aten.mul.Tensor", first, gate, **like)


PIECE_RULES: dict[str, Rule] = {
    "aten.slice": slice_,
    "aten.slice_scatter": slice_scatter,
    "aten.select_scatter": select_scatter,
    "aten.copy": copy,
    "aten.tensor_split": tensor_split,
    "aten.glu": glu,
}
