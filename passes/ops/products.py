"""Products of tensors, and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import isqrt, prod
from typing import Any

from ..graph import Node, Value
from ..ops import extents
from ..ops.cotangents import Cotangents
from ..ops.notation import parse
from ..ops.op import Autocast, Op, OutCotangents

# --- Rules ------------------------------------------------------------------------


def letters_of_einsum(node: Node) -> str | None:
    """The rule in an einsum's own letters, if no operand has a letter twice."""
    left, arrow, right = (
        node.arg("equation").replace(" ", "").replace("...", ".").partition("->")
    )
    if not arrow:
        once = sorted(c for c in left if c.isalpha() and left.count(c) == 1)
        right = "".join(["." if "." in left else "", *once])
    operands = left.split(",")
    if any(len(set(x)) < len(x) for x in operands) or ("." in left) > ("." in right):
        return None

    def spell(tensor: str) -> str:
        marked = (c if c in right else f"{c}+" for c in tensor)
        return " ".join(marked).replace(".", "...")

    return f"{', '.join(map(spell, operands))} -> {spell(right)}"


def of_matrices(node: Node) -> str:
    """The rule of matrices, or of a vector on one side, or on both."""
    left, right = (len(v.shape) for v in node.operands)
    if right == 1:
        return "... k+, k+ -> ..." if left > 1 else "k+, k+ -> "
    return "... m k+, ... k+ n -> ... m n" if left > 1 else "k+, ... k+ n -> ... n"


def solved(node: Node) -> str:
    """a x = b, or x a = b: each column, or row, by itself."""
    if node.arg("left"):
        return "... n! m!, ... m! k -> ... n! k"
    return "... m! n!, ... k m! -> ... k n!"


def convolved(node: Node) -> str:
    """x [b, c, s], w [o, c / groups, k]: a filter of its own for each channel, or all
    channels in each filter."""
    groups = node.arg("groups")
    bias = len(node.operands) > 2
    if groups == node.operands[0].shape[1] == node.out.shape[1]:
        return f"b c s!, c _ k!{', c' if bias else ''} -> b c t!"
    if groups > 1:
        return f"b c! s!, o! d! k!{', o!' if bias else ''} -> b o! t!"
    if bias:  # each partial sum would bring it in
        return "b c! s!, o c! k!, o -> b o t!"
    return "b c+ s!, o c+ k! -> b o t!"


# --- Operations -------------------------------------------------------------------


def by_columns(node: Node) -> int:
    """FLOPs of a product: each element sums over the first operand's columns."""
    return 2 * node.out.numel * node.operands[0].shape[-1]


def added_by_columns(node: Node) -> int:
    """The same of a product that is added to the first operand."""
    return 2 * node.out.numel * node.operands[1].shape[-1]


def of_einsum(node: Node) -> int:
    """Flops: each combination of letters is a multiply-add."""
    text = letters_of_einsum(node)
    rule = None if text is None else parse(text, node)
    if rule is None:
        return node.out.numel
    extents = {
        letters: n
        for v, dims in zip(node.operands, rule.operands, strict=True)
        for letters, n in zip(dims, v.shape, strict=True)
    }
    return 2 * prod(extents.values())


def of_filters(node: Node) -> int:
    """FLOPs of a convolution: each element sums over a filter [o, c, k]; transposed,
    each element of the operand is spread over those of its channel [c, o, k]."""
    weight, spread = node.named("weight transposed")
    spread = spread or "transpose" in node.name
    each = node.operands[0] if spread else node.out
    return 2 * each.numel * prod(weight.shape[1:])


def of_last_filters(node: Node) -> int:
    """The same of filters [k, c, o]."""
    return 2 * node.out.numel * prod(node.arg("weight").shape[:2])


def of_vectors(node: Node) -> int:
    """FLOPs of a product of vectors: each element of the result sums over a dim."""
    return 2 * node.out.numel * node.operands[0].shape[node.arg("dim")]


def contracted(node: Node) -> int:
    """FLOPs of a contraction. Each letter is in two of three tensors: in both factors,
    or in one and the result. What the product is added to does not count."""
    return 2 * isqrt(prod(v.numel for v in (*node.operands[-2:], node.out)))


def of_chain(node: Node) -> int:
    """Matrices one after the other, in the order that takes least."""
    first, *others = (v.shape for v in node.operands)
    ends = [first[0] if len(first) > 1 else 1, *(shape[0] for shape in others)]
    ends.append(others[-1][1] if len(others[-1]) > 1 else 1)

    @cache
    def least(i: int, j: int) -> int:
        between = range(i + 1, j)
        ways = (
            least(i, k) + least(k, j) + ends[i] * ends[k] * ends[j] for k in between
        )
        return min(ways, default=0)

    return 2 * least(0, len(ends) - 1)


def of_weight_grad(node: Node) -> int:
    """FLOPs of a weight's gradient: 2 rows in out."""
    first, second = node.operands[1:3]
    return 2 * first.numel * second.shape[-1]


# --- Derivatives ------------------------------------------------------------------


def linear(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """y = x w^T (+ b): dx = dy w, dw = dy^T x, db = sum dy."""
    to_weight = ("autopar.linear_weight_grad_", dys[0], node.operands[0])
    return _product(cts, node, dys[0], "aten.matmul.default", to_weight)


def affine(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """y = x w (+ b): dx = dy w^T, dw = x^T dy, db = sum dy."""
    to_weight = ("autopar.matmul_weight_grad_", node.operands[0], dys[0])
    return _product(cts, node, dys[0], "aten.linear.default", to_weight)


def matmul(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """d(matmul): by a weight as of a linear layer, else as of matrices."""
    return (affine if _is_by_weight(node) else matrices)(cts, node, dys)


def matrices(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """y = a b of as many matrices each: da = dy b^T, db = a^T dy."""
    (a, b), dy = node.operands, dys[0]
    assert dy is not None

    def turned(x: Value) -> Value:
        shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
        out = cts.builder.value("transpose", shape, x.dtype)
        args = (x, -2, -1)
        cts.append(Node("aten.transpose.int", args, {}, (out,), node.location))
        return out

    da = cts.emit(node.op, a, node, dy, turned(b)) if cts.wanted(a) else None
    db = cts.emit(node.op, b, node, turned(a), dy) if cts.wanted(b) else None
    return [da, db]


def _product(
    cts: Cotangents,
    node: Node,
    dy: Value | None,
    to_input: str,
    to_weight: tuple[Any, ...],
) -> list[Value | None]:
    assert dy is not None
    x, w, *bias = node.operands
    dw = cts.to_weight(w, to_weight[0], node, *to_weight[1:])
    d_bias = [cts.to_bias(b, dy, node) for b in bias]
    dx = cts.emit(to_input, x, node, dy, w) if cts.wanted(x) else None
    return [dx, dw, *d_bias]


def _is_by_weight(node: Node) -> bool:
    """x [.., k] @ w [k, n]: a product with a matrix is one with a weight."""
    return len(node.operands) == 2 and len(node.operands[1].shape) == 2


def _is_complex(cts: Cotangents, node: Node) -> bool:
    """Whether the derivatives conjugate operands."""
    return node.out.dtype.is_complex


def _of_other_shapes(cts: Cotangents, node: Node) -> bool:
    """Whether an operand is complex, a vector, or repeated for the other's matrices; or
    has a cotangent of another precision than its own."""
    a, b = node.operands
    if _is_complex(cts, node):
        return True
    if _is_by_weight(node):
        return len(a.shape) == 1
    alike = a.shape[:-2] == b.shape[:-2] and len(a.shape) == len(b.shape) > 2
    return not alike or any(cts.dtype(x) != x.dtype for x in (a, b))


def _filter_each(node: Node) -> Node:
    """Gives a depthwise convolution as many groups as it now has channels."""
    x, weight, groups = node.operands[0], node.operands[1], node.arg("groups")
    alone = groups > 1 and weight.shape[1] == 1
    return node.with_args(groups=x.shape[1]) if alone else node


# With a stride of 2, transposed, in one group.
SPREAD = "x(a, b, d), x(b, c, 2), None, (2,), (0,), (1,), True, (0,), 1"
HEEDED = {"mv": "self vec", "dot": "self tensor"}
# Products of which no more is known than how much they compute, see `Op`.
COUNTED: dict[str, tuple[Autocast, Callable[[Node], int], str]] = {
    "mv": ("low", by_columns, "default(x(a, b), x(b))"),
    "dot": ("equal", by_columns, "default(x(a), x(a))"),
    "vdot": ("equal", by_columns, "default(x(a), x(a))"),
    "inner": ("equal", by_columns, "default(x(a, b, c), x(d, c))"),
    "tensordot": ("equal", contracted, "default(x(a, b), x(c, b, a), (0, 1), (2, 1))"),
    "addr": ("low", contracted, "default(x(a, b), x(a), x(b))"),
    "addmv": ("low", contracted, "default(x(a), x(a, b), x(b))"),
    "addbmm": ("low", contracted, "default(x(b, d), x(a, b, c), x(a, c, d))"),
    "chain_matmul": ("low", of_chain, "default((x(d, b), x(b, a), x(a, c)))"),
    "linalg_multi_dot": ("low", of_chain, "default((x(b), x(b, a), x(a, d), x(d, c)))"),
    "linalg_vecdot": ("low", of_vectors, "default(x(a, b), x(a, b), dim=0)"),
    "bilinear": ("equal", of_filters, "default(x(a, b), x(a, c), x(d, b, c))"),
    "conv2d": (
        "low",
        of_filters,
        "padding(x(a, 2 * b, d, d), x(2 * c, b, 2, 1), groups=2)",
    ),
    "conv3d": ("low", of_filters, "default(x(a, b, d, d, d), x(c, b, 2, 1, 2), x(c))"),
    "conv_transpose1d": ("low", of_filters, "default(x(a, b, d), x(b, c, 2))"),
    "conv_transpose2d": ("low", of_filters, "input(x(a, b, d, d), x(b, c, 2, 1))"),
    "conv_transpose3d": (
        "low",
        of_filters,
        "input(x(a, b, d, d, d), x(b, c, 2, 1, 2))",
    ),
    "convolution": ("low", of_filters, f"default({SPREAD})"),
    "_convolution": ("low", of_filters, f"deprecated({SPREAD}, False, False, True)"),
    "conv_tbc": ("low", of_last_filters, "default(x(d, a, b), x(3, b, c), x(c), 1)"),
}

OPS = (
    Op(
        "aten.linear",
        "input weight bias",
        "... k+, n k+ -> ... n",
        "default(x(a, b, c), x(d, c))",
        linear="in each",
        extents=extents.linear,
        is_product=True,
        flops=by_columns,
        weights="weight bias",
        keeps=(0,),
        derivative=linear,
        traced_if=_is_complex,
        spelling="F.linear",
        autocast="low",
    ),
    Op(
        "aten.matmul",
        "self other",
        of_matrices,
        (
            "default(x(a, b, c), x(c, d)); default(x(a, b, c), x(c)); "
            "default(x(c), x(a, b, c, d)); default(x(c), x(c)); "
            "default(x(a, 1, b, c), x(1, d, c, b))"
        ),
        linear="in each",
        is_product=True,
        flops=by_columns,
        weights=lambda node: "other" if _is_by_weight(node) else "",
        keeps=(0, 1),
        derivative=matmul,
        traced_if=_of_other_shapes,
        spelling="torch.matmul",
        autocast="low",
    ),
    Op(
        "aten.bmm",
        "self mat2",
        "b m k+, b k+ n -> b m n",
        "default(x(a, b, c), x(a, c, d))",
        linear="in each",
        is_product=True,
        flops=by_columns,
        keeps=(0, 1),
        derivative=matrices,
        traced_if=_of_other_shapes,
        autocast="low",
    ),
    Op(
        "aten.baddbmm",
        "self batch1 batch2 beta alpha",
        # k is whole: each partial product would bring in the first operand once.
        "b m n, b m k!, b k! n -> b m n",
        "default(x(a, b, d), x(a, b, c), x(a, c, d), beta=2, alpha=3)",
        is_product=True,
        flops=added_by_columns,
        finite="kept",
        autocast="low",
    ),
    Op(
        "aten.mm",
        "self mat2",
        "m k+, k+ n -> m n",
        "default(x(a, b), x(b, c))",
        linear="in each",
        flops=by_columns,
        autocast="low",
    ),
    Op(
        "aten.addmm",
        "self mat1 mat2 beta alpha",
        lambda node: (
            f"{'m n' if len(node.operands[0].shape) > 1 else 'n'}, m k!, k! n -> m n"
        ),
        "default(x(c), x(a, b), x(b, c)); default(x(a, c), x(a, b), x(b, c))",
        flops=added_by_columns,
        finite="kept",
        autocast="low",
    ),
    Op(
        "aten.einsum",
        "equation tensors path",
        letters_of_einsum,
        (
            "default('bid,bjd->bij', (x(a, b, d), x(a, c, d))); "
            "default('... i, i j', (x(a, b, c), x(c, d))); "
            "default('ij,jk,kl', (x(a, b), x(b, c), x(c, d))); "
            "default('i...,j->j...', (x(a, b, c), x(d)))"
        ),
        linear="in each",
        is_product=True,
        flops=of_einsum,
        autocast="low",
    ),
    Op(
        "aten.linalg_solve_triangular",
        "self B upper left unitriangular",
        solved,
        (
            "default(x(a, d, d), x(a, d, c), upper=False, unitriangular=True); "
            "default(x(d, d), x(a, c, d), upper=True, left=False, unitriangular=True)"
        ),
        linear="in the second",
    ),
    Op(
        "aten.conv1d",
        "input weight bias stride padding dilation groups",
        convolved,
        (
            "default(x(a, b, d), x(b, 1, 2), x(b), (1,), (1,), (1,), b); "
            "default(x(a, b, d), x(c, b, 2), None, (1,), (1,), (1,), 1); "
            "default(x(a, b, d), x(c, b, 2), x(c), (1,), (1,), (1,), 1); "
            "default(x(a, 2 * b, d), x(2 * c, b, 2), None, (1,), (1,), (1,), 2)"
        ),
        extents=extents.convolved,
        flops=of_filters,
        sizes=_filter_each,
        finite="kept",
        autocast="low",
    ),
    *(
        Op(f"aten.{n}", HEEDED.get(n, ""), examples=x, flops=flops, autocast=autocast)
        for n, (autocast, flops, x) in COUNTED.items()
    ),
    *(Op(f"aten.{name}", autocast="equal") for name in ("cross", "linalg_cross")),
    Op("aten.prelu", autocast="low"),
    Op("aten._grouped_mm", autocast="low", lowered=2, extents=extents.of_groups),
    Op("autopar.affine", "x weight bias", flops=by_columns, derivative=affine),
    Op("autopar.bias_grad_", "into dy"),
    Op("autopar.linear_weight_grad_", "into dy x", flops=of_weight_grad),
    Op("autopar.matmul_weight_grad_", "into x dy", flops=of_weight_grad),
)
