"""Ops that are others in one, decomposed, so that what these may split is known.

The rules are our own, as torch's decompositions are made for kernels: there `repeat` is
three copies, `dot` and `mv` are no products any more, and `group_norm` and
`_weight_norm` end in ops whose statistics nobody can split; and each takes some 50 ms
to be traced.
"""

from __future__ import annotations

from dataclasses import replace

from ...graph import Node, Value
from ...ops.arguments import arguments
from ...rewrite import Rewriter, Rule, broadcast_tensors, expand_as


def tensor_split(rewriter: Rewriter, node: Node) -> tuple[Value | None, ...]:
    """`tensor_split` with other arguments is `split_with_sizes`."""
    x = node.operands[0]
    dim = node.arg("dim") % len(x.shape)
    sizes = tuple(v.shape[dim] for v in node.results)
    op, args = "aten.split_with_sizes.default", (x, sizes, dim)
    return rewriter.keep(replace(node, op=op, args=args, kwargs={}))


def glu(rewriter: Rewriter, node: Node) -> Value:
    """The first half times the sigmoid of the second."""
    x, out = node.operands[0], node.out
    dim = node.arg("dim") % len(x.shape)
    halves = tuple(Value("half", out.shape, x.dtype) for _ in range(2))
    args = (x, (out.shape[dim],) * 2, dim)
    first, second = rewriter.keep(
        Node("aten.split_with_sizes.default", args, {}, halves, node.location)
    )
    gate = rewriter.like(node, "aten.sigmoid.default", second)
    return rewriter.like(node, "aten.mul.Tensor", first, gate)


def repeat(rewriter: Rewriter, node: Node) -> Value:
    """repeat -> an expand along a new dim, and a reshape."""
    x, out = node.operands[0], node.out
    extents = (*(1,) * (len(out.shape) - len(x.shape)), *x.shape)
    pairs = [(n // e if e else 1, e) for n, e in zip(out.shape, extents, strict=True)]
    apart = tuple(n for times, e in pairs for n in ((1, e) if times != 1 else (e,)))
    many = tuple(n for times, e in pairs for n in ((times, e) if times != 1 else (e,)))
    x = rewriter.expand(rewriter.reshape(x, apart), many)
    return rewriter.reshape(x, out.shape)


def sum_to_size(rewriter: Rewriter, node: Node) -> Value:
    """A sum over the dims that were broadcast."""
    x, shape = node.operands[0], node.out.shape
    extents = (*(1,) * (len(x.shape) - len(shape)), *shape)
    dims = tuple(i for i, n in enumerate(x.shape) if n != extents[i])
    if dims:
        x = rewriter.emit("aten.sum.dim_IntList", x, dims, True)
    return rewriter.reshape(x, shape)


def nansum(rewriter: Rewriter, node: Node) -> tuple[Value | None, ...]:
    """nansum -> the sum of all elements but nan."""
    x = node.operands[0]
    hidden = rewriter.emit("aten.isnan.default", x)
    x = rewriter.emit("aten.masked_fill.Scalar", x, hidden, 0.0)
    asked = arguments(node)
    kwargs = {"dtype": asked["dtype"]}
    if asked["dim"] is None and not asked["keepdim"]:
        new = replace(node, op="aten.sum.default", args=(x,), kwargs=kwargs)
    else:
        args = (x, asked["dim"], asked["keepdim"])
        new = replace(node, op="aten.sum.dim_IntList", args=args, kwargs=kwargs)
    return rewriter.keep(new)


def of_vectors(rewriter: Rewriter, node: Node) -> Value:
    """`dot` and `mv` are products as any."""
    return rewriter.like(node, "aten.matmul.default", *node.operands)


def subtraction(rewriter: Rewriter, node: Node) -> Value | None:
    """x - y of scalars is x + (- y), which may be pending sums, and so may one of them.

    A number becomes a value, see `add_number`.
    """
    asked, out = arguments(node), node.out
    if out.shape != () or not out.dtype.is_floating_point:
        return None
    x, y = asked["self"], asked["other"]
    if node.name == "aten.rsub":
        x, y = y, x
    if isinstance(y, Value):
        if y.dtype != out.dtype:
            y = rewriter.like(node, "aten.to.dtype", y, out.dtype)
        y = rewriter.like(node, "aten.mul.Tensor", y, -asked["alpha"])
    else:
        y = -asked["alpha"] * y
    if not isinstance(x, Value):
        x, y = y, x
    return rewriter.like(node, "aten.add.Tensor", x, y)


def weight_norm(rewriter: Rewriter, node: Node) -> Value:
    """v g / |v|, the norm over all dims but one, or over all where that is -1: arXiv
    1602.07868, equation 2."""
    v, g = node.operands
    dim = node.arg("dim")
    others = tuple(d for d in range(len(v.shape)) if d != dim)
    squares = rewriter.like(node, "aten.square.default", v)
    norm = rewriter.emit("aten.sum.dim_IntList", squares, others, dim != -1)
    scale = rewriter.emit(
        "aten.div.Tensor", g, rewriter.emit("aten.sqrt.default", norm)
    )
    return rewriter.like(node, "aten.mul.Tensor", v, scale)


def group_norm(rewriter: Rewriter, node: Node) -> Value:
    """layer_norm of each group of channels, then a weight and a bias for each channel:
    arXiv 1803.08494, section 3.1."""
    x, groups = node.operands[0], node.arg("num_groups")
    n, channels, *rest = x.shape
    shape = (n, groups, channels // groups, *rest)
    grouped = rewriter.reshape(x, shape)
    y = rewriter.emit(
        "aten.layer_norm.default", grouped, shape[2:], None, None, node.arg("eps")
    )
    y = rewriter.reshape(y, x.shape)
    for op, name in (("mul", "weight"), ("add", "bias")):
        if (v := node.arg(name)) is not None:
            v = rewriter.reshape(v, (channels, *(1 for _ in rest)))
            y = rewriter.like(node, f"aten.{op}.Tensor", y, v)
    return y


def take_along_dim(rewriter: Rewriter, node: Node) -> Value:
    """`gather` of two operands that are broadcast but for a dim, or of all elements."""
    x, index, dim = node.named("self indices dim")
    if dim is None:
        x, index = (rewriter.reshape(v, (v.numel,)) for v in (x, index))
        return rewriter.like(node, "aten.gather.default", x, 0, index)
    dim %= len(node.out.shape)
    shape = [*node.out.shape]
    shape[dim] = index.shape[dim]
    index = rewriter.expand(index, shape)
    shape[dim] = x.shape[dim]
    return rewriter.like(
        node, "aten.gather.default", rewriter.expand(x, shape), dim, index
    )


COMPOSITE_RULES: dict[str, Rule] = {
    "aten.tensor_split": tensor_split,
    "aten.glu": glu,
    "aten.repeat": repeat,
    "aten.tile": repeat,
    "aten.expand_as": expand_as,
    "aten.broadcast_to": expand_as,
    "aten.broadcast_tensors": broadcast_tensors,
    "aten.take_along_dim": take_along_dim,
    "aten.sum_to_size": sum_to_size,
    "aten.nansum": nansum,
    "aten.dot": of_vectors,
    "aten.mv": of_vectors,
    "aten.sub": subtraction,
    "aten.rsub": subtraction,
    "aten._weight_norm": weight_norm,
    "aten.group_norm": group_norm,
}
