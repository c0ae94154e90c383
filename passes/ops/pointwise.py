"""Ops that go element by element, and that torch does not tag so, or that more is known
of; casts; losses that `normalize` leaves unreduced."""

from __future__ import annotations

from typing import Any

from ..graph import Node, Value
from ..ops import parts, shrunk
from ..ops.cotangents import Cotangents
from ..ops.op import Finite, Op, OutCotangents


def add(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """d(add): each operand's gradient is dy, summed over dims that were broadcast."""
    dy = dys[0]
    assert dy is not None
    grads: list[Value | None] = []
    for v in node.operands:
        if v.shape == dy.shape and cts.wanted(v):
            grads.append(cts.cast(dy, v, node))
        else:
            grads.append(cts.to_bias(v, dy, node))
    if sum(g is dy for g in grads) > 1:
        cts.share(dy)
    return grads


def cast(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """dx = dy in x's dtype."""
    dy = dys[0]
    return [None if dy is None else cts.cast(dy, node.operands[0], node)]


def _heeded(name: str, heeds: str, finite: Finite = "kept", **declared: Any) -> Op:
    return Op(f"aten.{name}", heeds, "pointwise", finite=finite, **declared)


def _loss(name: str, heeds: str, finite: Finite = "kept") -> Op:
    return _heeded(name, f"self target {heeds}", finite, autocast="wide")


def by_number(node: Node) -> Finite:
    """A quotient by a number that is not 0."""
    return "" if node.arg("other") == 0 or len(node.operands) > 1 else "kept"


def to_power(node: Node) -> Finite:
    """x, its square, its cube: of others the derivative at 0 is infinite."""
    power = node.arg("exponent")
    whole = isinstance(power, int | float) and power >= 1 and power == int(power)
    return "kept" if whole else ""


def square(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """dx = 2 x dy."""
    x, dy = node.operands[0], dys[0]
    product = cts.emit("aten.mul.Tensor", x, node, dy, x)
    return [cts.emit("aten.mul.Tensor", x, node, product, 2)]


def chosen(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """dx = dy where the condition holds, else 0."""
    condition, x = node.operands
    return [None, cts.emit(node.op, x, node, condition, dys[0], 0)]


def scaled_again(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """Dropout's mask and scale, applied to dy."""
    x, keep, scale = node.named("x keep scale")
    return [cts.emit(node.op, x, node, dys[0], keep, scale), None]


OPS = (
    Op(
        "aten.add",
        "self other alpha",
        form="Tensor",
        linear="jointly",
        counts=True,
        shrunk=shrunk.comparison,
        row_by_row=True,
        derivative=add,
        traced_if=lambda cts, node: "alpha" in node.kwargs,
        spelling="torch.add",
        in_place=".add_",
        commutes=True,
    ),
    Op(
        "aten.sub",
        "self other alpha",
        form="Tensor",
        linear="jointly",
        counts=True,
        shrunk=shrunk.comparison,
        row_by_row=True,
        spelling="torch.sub",
        in_place=".sub_",
    ),
    Op(
        "aten.mul",
        "self other",
        form="Tensor",
        linear="in each",
        row_by_row=True,
        keeps=(0, 1),
        spelling="torch.mul",
        in_place=".mul_",
        commutes=True,
    ),
    Op(
        "aten.div",
        form="Tensor",
        linear="in the first",
        finite=by_number,
        spelling="torch.div",
        in_place=".div_",
    ),
    Op(
        "aten.neg",
        linear="jointly",
        row_by_row=True,
        spelling="torch.neg",
        in_place=".neg_",
    ),
    Op("aten.log", spelling="torch.log", in_place="aten.log_.default", autocast="wide"),
    Op(
        "aten.rsqrt",
        spelling="torch.rsqrt",
        in_place="aten.rsqrt_.default",
        autocast="wide",
    ),
    Op("aten.gelu", keeps=(0,), row_by_row=True, finite="kept"),
    Op("aten.relu", keeps=(0,), row_by_row=True, finite="kept", selects=True),
    Op("aten.sigmoid", row_by_row=True, finite="always"),
    Op("aten.tanh", row_by_row=True, finite="always"),
    Op(
        "aten.clamp",
        row_by_row=True,
        finite="kept",
        values="replaced",
        shrunk=shrunk.limited,
    ),
    Op("aten.silu", "self", "pointwise", keeps=(0,), row_by_row=True, finite="kept"),
    Op(
        "aten.pow",
        "self exponent",
        "pointwise",
        form="Tensor_Scalar",
        keeps=(0,),
        finite=to_power,
        derivative=square,
        traced_if=lambda cts, node: (
            node.arg("exponent") != 2 or node.out.dtype.is_complex
        ),
        autocast="wide",
    ),
    *(
        Op(f"aten.{name}", finite="kept")
        for name in ("abs", "cos", "elu", "erf", "sin")
    ),
    *(
        Op(f"aten.{name}", finite="kept", values="replaced")
        for name in ("maximum", "minimum")
    ),
    Op("aten.masked_fill", finite="kept", values="replaced", shrunk=shrunk.filled),
    *(
        Op(f"aten.{name}", shrunk=shrunk.comparison)
        for name in ("gt", "ge", "lt", "le")
    ),
    *(Op(f"aten.{name}", shrunk=shrunk.equality) for name in ("eq", "ne")),
    Op("aten.clamp_min", values="replaced", shrunk=shrunk.limited),
    Op("aten.clamp_max", selects=True, shrunk=shrunk.limited),
    *(Op(f"aten.{name}", selects=True) for name in ("fmax", "fmin")),
    Op("aten.threshold", selects=True),
    Op("aten.softplus", finite="kept", autocast="wide"),
    *(
        Op(f"aten.{name}", autocast="wide")
        for name in (
            *("exp", "expm1", "log10", "log1p", "log2", "reciprocal", "erfinv"),
            *("acos", "asin", "cosh", "sinh", "tan"),
            # Of complex numbers in half the bits, most do not exist.
            *("complex", "polar"),
        )
    ),
    *(
        Op(f"aten.{name}", autocast="equal")
        for name in ("lerp", "addcmul", "addcdiv", "atan2")
    ),
    Op(
        "aten.to",
        "self dtype other copy",
        "pointwise",
        form="dtype",
        linear="cast",
        elements="cast",
        counts=True,
        put_back=parts.reshaped,
        row_by_row=True,
        derivative=cast,
        spelling=".to",
    ),
    Op(
        "aten.where",
        "condition self other",
        "pointwise",
        form="ScalarOther",
        linear="chosen",
        finite="kept",
        derivative=chosen,
        traced_if=lambda cts, node: node.operands[1].type != node.out.type,
        values="replaced",
        shrunk=shrunk.filled,
    ),
    _heeded("__and__", "self other"),
    _heeded("__or__", "self other"),
    _heeded("__xor__", "self other"),
    _heeded("floor_divide", "self other", "", shrunk=shrunk.quotient),
    _heeded("square", "self"),
    _heeded("mish", "self"),
    _heeded("log_sigmoid", "self"),
    _heeded("copy", "self src", values="replaced"),
    _heeded("fill", "self value"),
    _heeded("zero", "self"),
    _heeded("leaky_relu", "self negative_slope"),  # tagged from torch 2.12 on
    _loss("mse_loss", "reduction"),
    _loss("l1_loss", "reduction"),
    _loss("smooth_l1_loss", "reduction beta"),
    _loss("huber_loss", "reduction delta"),
    _loss("binary_cross_entropy", "weight reduction", ""),
    _loss("binary_cross_entropy_with_logits", "weight pos_weight reduction"),
    _loss("kl_div", "reduction log_target", ""),
    Op("autopar.masked_scale", "x keep scale", rowwise=True, derivative=scaled_again),
    Op("autopar.add_", "into x", rowwise=True),
    Op("autopar.add_each_", "sums terms"),
)
