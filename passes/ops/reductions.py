"""Ops that go along dims: sums, maxima, softmax, norms, what is sorted or shifted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ..graph import Node, Value
from ..ops import extents, shrunk
from ..ops.cotangents import Cotangents
from ..ops.notation import letters, marked, spell
from ..ops.op import Op, OutCotangents


def dims_of(node: Node, name: str = "dim") -> list[int]:
    """The dims argument of a node, as non-negative ints (all dims if it is absent)."""
    rank, dims = max(1, len(node.operands[0].shape)), node.arg(name)
    if dims is None or dims == ():
        return list(range(rank))
    return [d % rank for d in (dims if isinstance(dims, tuple) else (dims,))]


def reduced(suffix: str) -> Callable[[Node], str]:
    """The rule of a reduction, whose dims have a suffix: `+` is summed, `!` whole."""

    def rule(node: Node) -> str:
        x = letters(len(node.operands[0].shape))
        dims = dims_of(node)
        operand = marked(x, dims, suffix)
        out = [c for i, c in enumerate(x) if i not in dims]
        if len(node.out.shape) == len(x):  # keepdim
            out = ["_" if i in dims else c for i, c in enumerate(x)]
        return spell(operand, out)

    return rule


def binned(node: Node) -> str:
    """histc: how many there are in each bin, of bins that do not depend on them."""
    low, high = node.named("min max")
    x = letters(len(node.operands[0].shape))
    return spell(marked(x, range(len(x)), "+" if low < high else "!"), ["n!"])


def along(node: Node, name: str = "dim") -> str:
    """Ops that work along one dim and keep the shape: softmax, cumsum."""
    both = marked(letters(len(node.operands[0].shape)), dims_of(node, name))
    return spell(both, both)


def topmost(node: Node) -> str:
    """topk, sort: what comes out along the dim has been all over it."""
    x, dims = letters(len(node.operands[0].shape)), dims_of(node)
    return spell(marked(x, dims), marked(x, dims, "out!"), len(node.outs))


def count_of_topmost(node: Node) -> Node:
    """Sets topk's k to that of the local result."""
    shape = node.results[0].shape
    return node.with_args(k=shape[node.arg("dim")]) if shape else node


def extreme(node: Node) -> str:
    """The rule for all, along a dim (with indices), or of two tensors."""
    if node.op.endswith(".other"):
        return "..., ... -> ..."
    if node.op == "aten.max.default":
        return reduced("^")(node)
    one = reduced("!")(replace(node, outs=node.outs[:1]))
    left, right = one.split("->")
    return f"{left}->{', '.join([right] * len(node.outs))}"


def norm(node: Node) -> str:
    """layer_norm, rms_norm: all dims of the given shape are whole."""
    normal = " ".join(f"{c}!" for c in letters(len(node.arg("normalized_shape"))))
    weights = [normal] * (len(node.operands) - 1)
    return f"{', '.join([f'... {normal}', *weights])} -> ... {normal}"


def normal_sizes(node: Node) -> Node:
    """Sets the normalized shape to that of the local result."""
    count = len(node.arg("normalized_shape"))
    return node.with_args(normalized_shape=node.out.shape[-count:])


def sum_exp(x: Tensor, largest: Tensor) -> Tensor:
    """x [..., v], largest [...] -> [...]; see `autopar.runtime.kernels`."""
    shift = largest.masked_fill(largest.isinf(), 0)
    return (x - shift[..., None]).exp().sum(-1)


def d_sum_exp(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """dx = dy exp(x - largest)."""
    x, largest = node.named("x largest")
    op = "autopar.sum_exp_backward"
    return [cts.emit(op, x, node, x, dys[0], largest), None]


OPS = (
    Op(
        "aten.sum",
        "self dim keepdim dtype",
        reduced("+"),
        (
            "default(x(a, b)); default(bools(a, b)); "
            "dim_IntList(x(a, b, c), (0, -1)); "
            "dim_IntList(x(a, b, c), (-2,), True); "
            "default(x(a, b), dtype=torch.int64)"
        ),
        linear="jointly",
        autocast="wide",
    ),
    Op(
        "aten.mean",
        "self dim keepdim dtype",
        reduced("!"),
        "default(x(a, b)); dim(x(a, b, c), (-1,), True)",
        finite="kept",
        autocast="wide",
    ),
    Op(
        "aten.histc",
        "self bins min max",
        binned,
        "default(x(a, b), 4, -1, 1); default(x(a), 4)",
        extents=extents.counted,
        shrunk=shrunk.histogram,
    ),
    Op(
        "aten.amax",
        "self dim keepdim",
        reduced("^"),
        "default(x(a, b, c), (-1,)); default(x(a, b), (0,), keepdim=True)",
        spelling="torch.amax",
        finite="kept",
        selects=True,
    ),
    Op(
        "aten.var",
        "self dim unbiased correction keepdim",
        reduced("!"),
        (
            "default(x(a, b), False); dim(x(a, b, c), (-1,), False, True); "
            "correction(x(a, b), (1,), correction=0)"
        ),
        finite="kept",
    ),
    Op(
        "aten.linalg_vector_norm",
        "self ord dim keepdim dtype",
        reduced("!"),
        "default(x(a, b), 2.0); default(x(a, b), 2.0, (1,), True)",
        autocast="wide",
    ),
    Op(
        "aten.softmax",
        "self dim dtype",
        along,
        "int(x(a, b, c), -1)",
        form="int",
        rowwise=True,
        keeps=("result",),
        finite="always",
        autocast="wide",
    ),
    Op(
        "aten._softmax",
        "self dim",
        along,
        "default(x(a, b, c), 1, False)",
        rowwise=True,
        finite="always",
    ),
    Op("aten._softmax_backward_data", rowwise=True),
    Op(
        "aten.log_softmax",
        "self dim dtype",
        along,
        "int(x(a, b, c), 0)",
        finite="kept",
        autocast="wide",
    ),
    Op(
        "aten.cumsum",
        "self dim dtype",
        along,
        "default(x(a, b, c), 1)",
        finite="kept",
        autocast="wide",
    ),
    Op(
        "aten.roll",
        "self shifts dims",
        lambda node: along(node, "dims"),
        "default(x(a, b, c), (1,), (1,)); default(x(a, b), (1,))",
        finite="kept",
        values="moved",
    ),
    Op(
        "aten.topk",
        "self k dim largest sorted",
        topmost,
        "default(x(a, b, c), 2); default(x(a, c, b), 2, 1)",
        sizes=count_of_topmost,
        finite="kept",
        selects=True,
    ),
    Op(
        "aten.sort",
        "self stable dim descending",
        topmost,
        "default(x(a, b, c), 0)",
        extents=extents.ordered,
        finite="kept",
        selects=True,
    ),
    Op(
        "aten.argsort",
        "self stable dim descending",
        topmost,
        "default(x(a, b, c), 0)",
        extents=extents.ordered,
    ),
    *(
        Op(
            f"aten.{name}",
            "self dim keepdim",
            reduced("!"),
            "default(x(a, b, c), -1); default(x(a, b, c), 0, True)",
        )
        for name in ("argmax", "argmin")
    ),
    Op(
        "aten.max",
        "self other dim keepdim",
        extreme,
        "dim(x(a, b, c), -1); default(x(a, b)); other(x(a, 1, b), x(c, 1))",
        finite="kept",
        selects=True,
    ),
    Op(
        "aten.min",
        "self other dim keepdim",
        extreme,
        "dim(x(a, b, c), 0, True)",
        finite="kept",
        selects=True,
    ),
    *(Op(f"aten.{name}", selects=True) for name in ("amin", "aminmax", "kthvalue")),
    *(Op(f"aten.{name}", selects=True) for name in ("median", "nanmedian", "mode")),
    *(Op(f"aten.{name}", selects=True) for name in ("cummax", "cummin")),
    Op(
        "aten.layer_norm",
        "input normalized_shape weight bias eps cudnn_enable",
        norm,
        "default(x(a, b, c), (c,), x(c), x(c)); default(x(a, b, c), (b, c))",
        weights="weight bias",
        keeps=(0,),
        sizes=normal_sizes,
        finite="kept",
        autocast="wide",
    ),
    Op(
        "aten.rms_norm",
        "input normalized_shape weight eps",
        norm,
        "default(x(a, b, c), (c,), x(c)); default(x(a, b, c), (c,))",
        rowwise=True,
        weights="weight",
        keeps=(0,),
        sizes=normal_sizes,
        finite="kept",
        autocast="wide",
    ),
    Op(
        "aten.native_layer_norm",
        rowwise=True,
        spelling="torch.native_layer_norm",
        autocast="wide",
    ),
    Op("aten.native_layer_norm_backward", rowwise=True),
    *(
        Op(f"aten.{name}", autocast="wide")
        for name in (
            *("norm", "linalg_matrix_norm", "frobenius_norm", "nuclear_norm", "renorm"),
            *("prod", "cumprod", "dist", "pdist", "cdist", "cosine_similarity"),
        )
    ),
    Op(
        "autopar.sum_exp",
        "x largest",
        "... k+, ... -> ...",
        "(x(a, b, c), x(a, b))",
        derivative=d_sum_exp,
        formula=sum_exp,
    ),
    Op(
        "autopar.sum_exp_backward", "x dy largest", in_place="kernels.sum_exp_backward_"
    ),
    Op("autopar.sum_exp_backward_", "x dy largest"),
)
