"""The loss in pieces whose sharding rules are plain.

A vocab-parallel loss then falls out of splitting the logits: a maximum, a sum of
exponentials, a masked lookup and a count of tokens. No rank ever holds the whole logits
or the softmax.

    nll = log(sum exp(x - m)) + m - x[target],   m = max x

The derivative with respect to m is zero, so m counts as a constant (Shoeybi 2019,
section 3, keeps the same three reductions).
"""

from __future__ import annotations

from typing import Any

import torch

from passes.capture.rewrite import Rewriter, Rule
from passes.errors import CaptureError
from passes.graph import Node, Value

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


def cross_entropy(rewriter: Rewriter, node: Node) -> Value:
    """aten.cross_entropy_loss(x, target, weight, reduction, ignore_index, ...)."""
    given = _arguments(node, ("self", "target", "weight", "reduction", "ignore_index"))
    smoothing = given.get("label_smoothing", 0.0)
    if len(node.args) > 5:
        smoothing = node.args[5]
    x, target = given["self"], given["target"]
    _require_plain(node, given)
    x = _classes_last(rewriter, x, node)
    rows = x.shape[:-1]

    def emit(op: str, *args: Any, name: str) -> Value:
        return rewriter.emit(
            op, *args, shape=rows, dtype=x.dtype, where=node.where, name=name
        )

    normalizer = _log_sum_exp(rewriter, x, node)
    picked = emit("autopar.pick", x, target, name="picked")
    nll = emit("aten.sub.Tensor", normalizer, picked, name="nll")
    if smoothing:
        classes = x.shape[-1]
        mean = emit("aten.sum.dim_IntList", x, (-1,), name="sum_logits")
        mean = emit("aten.mul.Tensor", mean, 1.0 / classes, name="mean_logits")
        uniform = emit("aten.sub.Tensor", normalizer, mean, name="uniform_nll")
        nll = emit("aten.mul.Tensor", nll, 1.0 - smoothing, name="nll")
        uniform = emit("aten.mul.Tensor", uniform, smoothing, name="uniform_nll")
        nll = emit("aten.add.Tensor", nll, uniform, name="nll")
    return _reduce(rewriter, nll, target, given, node)


def _log_sum_exp(rewriter: Rewriter, x: Value, node: Node) -> Value:
    """x [..., classes] -> [...]."""

    def emit(op: str, *args: Any, like: Value, name: str | None = None) -> Value:
        return rewriter.emit(
            op, *args, shape=like.shape, dtype=x.dtype, where=node.where, name=name
        )

    rows = Value("", x.shape[:-1], x.dtype)
    free = emit("aten.detach.default", x, like=x)
    largest = emit("aten.amax.default", free, (-1,), like=rows, name="largest")
    total = emit("autopar.sum_exp", x, largest, like=rows, name="sum_exp")
    log = emit("aten.log.default", total, like=rows, name="log")
    return emit("aten.add.Tensor", log, largest, like=rows, name="logsumexp")


def logsumexp(rewriter: Rewriter, node: Node) -> Value | None:
    """Along the last dim: of logits, for a loss that keeps them small (z-loss)."""
    x, dims = node.operands[0], node.args[1]
    if dims not in ((-1,), (len(x.shape) - 1,)) or node.out.shape != x.shape[:-1]:
        return None
    return _log_sum_exp(rewriter, x, node)


def log_softmax(rewriter: Rewriter, node: Node) -> Value | None:
    """Along the last dim, as a loss by hand has it: x - log(sum exp(x))."""
    given = _arguments(node, ("self", "dim", "dtype"))
    x, out, where = given["self"], node.out, node.where
    if given["dim"] % max(1, len(x.shape)) != len(x.shape) - 1:
        return None
    if x.dtype != out.dtype:
        x = rewriter.like(node, "aten.to.dtype", x, out.dtype)
    total = _log_sum_exp(rewriter, x, node)
    total = rewriter.reshape(total, (*x.shape[:-1], 1), where)
    return rewriter.like(node, "aten.sub.Tensor", x, total)


def gather(rewriter: Rewriter, node: Node) -> Value | None:
    """One element of each row, as a loss by hand looks its targets up."""
    x, dim, index = node.args[:3]
    rows = (*x.shape[:-1], 1)
    last = len(x.shape) - 1
    if not x.shape or dim % len(x.shape) != last or index.shape != rows:
        return None
    if not x.dtype.is_floating_point:
        return None
    index = rewriter.reshape(index, rows[:-1], node.where)
    picked = _picked(rewriter, x, index, node)
    return rewriter.reshape(picked, rows, node.where)


def _picked(rewriter: Rewriter, x: Value, index: Value, node: Node) -> Value:
    """x[..., index]; of x - y, with one y a row, without the difference."""
    rows = x.shape[:-1]

    def emit(op: str, *args: Any) -> Value:
        return rewriter.emit(
            op, *args, shape=rows, dtype=x.dtype, where=node.where, name="picked"
        )

    difference = rewriter.producer(x, "aten.sub")
    if difference is not None and not difference.kwargs:
        from_, by = difference.args
        if isinstance(by, Value) and by.shape == (*rows, 1) and from_.shape == x.shape:
            by = rewriter.reshape(by, rows, node.where)
            return emit("aten.sub.Tensor", emit("autopar.pick", from_, index), by)
    return emit("autopar.pick", x, index)


def nll_loss(rewriter: Rewriter, node: Node) -> Value:
    """aten.nll_loss_nd(log_probabilities, target, weight, reduction, ignore_index)."""
    given = _arguments(node, ("self", "target", "weight", "reduction", "ignore_index"))
    x, target = given["self"], given["target"]
    _require_plain(node, given)
    x = _classes_last(rewriter, x, node)
    picked = _picked(rewriter, x, target, node)
    nll = rewriter.emit(
        "aten.neg.default",
        picked,
        shape=picked.shape,
        dtype=x.dtype,
        where=node.where,
        name="nll",
    )
    return _reduce(rewriter, nll, target, given, node)


def _arguments(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _require_plain(node: Node, given: dict[str, Any]) -> None:
    if given.get("weight") is not None:
        raise CaptureError(
            "cross entropy with class weights is not supported yet",
            source=str(node.where),
            fix="weigh the tokens yourself: F.cross_entropy(..., reduction='none') "
            "times weight[target], summed and divided by the sum of weights",
        )
    if given["target"].dtype.is_floating_point:
        raise CaptureError(
            "cross entropy with class probabilities is not supported yet",
            source=str(node.where),
            fix="use -(target * x.log_softmax(-1)).sum(-1) in the model",
        )


def _classes_last(rewriter: Rewriter, x: Value, node: Node) -> Value:
    """[n, classes, d...] -> [n, d..., classes]."""
    if len(x.shape) <= 2:
        return x
    order = (0, *range(2, len(x.shape)), 1)
    shape = tuple(x.shape[i] for i in order)
    return rewriter.emit(
        "aten.permute.default", x, order, shape=shape, dtype=x.dtype, where=node.where
    )


def _reduce(
    rewriter: Rewriter, nll: Value, target: Value, given: dict[str, Any], node: Node
) -> Value:
    """Leave out the ignored tokens; sum, or divide by the count of the others.

    The count is read off the target alone, so it can be known ahead of all
    microbatches: that is what makes the mean separable over them.
    """
    where, ignored = node.where, given.get("ignore_index", -100)
    reduction = given.get("reduction", MEAN)

    def emit(
        op: str, *args: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str
    ) -> Value:
        return rewriter.emit(
            op, *args, shape=shape, dtype=dtype, where=where, name=name
        )

    kept = emit(
        "aten.ne.Scalar",
        target,
        ignored,
        shape=target.shape,
        dtype=torch.bool,
        name="kept",
    )
    nll = emit(
        "aten.where.ScalarOther",
        kept,
        nll,
        0.0,
        shape=nll.shape,
        dtype=nll.dtype,
        name="kept_nll",
    )
    if reduction not in (MEAN, SUM):
        return nll
    total = emit("aten.sum.default", nll, shape=(), dtype=nll.dtype, name="total")
    if reduction == SUM:
        return total
    count = emit("aten.sum.default", kept, shape=(), dtype=torch.int64, name="tokens")
    return emit("aten.div.Tensor", total, count, shape=(), dtype=nll.dtype, name="loss")


def elementwise(rewriter: Rewriter, node: Node) -> Value | None:
    """mse_loss and its like: a loss for each element, summed, over their number."""
    name = node.op.split(".")[1]
    names = ELEMENTWISE[name]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    reduction = given.get("reduction", MEAN)
    if reduction not in (MEAN, SUM):
        return None
    operands = [v for v in given.values() if isinstance(v, Value)]
    shape = torch.broadcast_shapes(*(v.shape for v in operands))
    dtype, where = node.out.dtype, node.where
    loss = rewriter.builder.value(name, shape, dtype)
    arguments = [given.get(n, DEFAULTS.get(n)) for n in names]
    arguments[names.index("reduction")] = NONE
    each = Node(node.op, tuple(arguments), {}, (loss,), where)
    rewriter.builder.nodes.append(each)
    rewriter.made[loss.name] = each
    total = rewriter.emit(
        "aten.sum.default", loss, shape=(), dtype=dtype, where=where, name="total"
    )
    if reduction == SUM:
        return total
    share = 1.0 / max(1, loss.numel)
    return rewriter.emit(
        "aten.mul.Tensor", total, share, shape=(), dtype=dtype, where=where, name="loss"
    )


# Losses of elements, with the names of their arguments.
ELEMENTWISE: dict[str, tuple[str, ...]] = {
    "mse_loss": ("self", "target", "reduction"),
    "l1_loss": ("self", "target", "reduction"),
    "smooth_l1_loss": ("self", "target", "reduction", "beta"),
    "huber_loss": ("self", "target", "reduction", "delta"),
    "binary_cross_entropy": ("self", "target", "weight", "reduction"),
    "binary_cross_entropy_with_logits": (
        "self",
        "target",
        "weight",
        "pos_weight",
        "reduction",
    ),
    "kl_div": ("self", "target", "reduction"),
}
DEFAULTS = {"beta": 1.0, "delta": 1.0}

LOSS_RULES: dict[str, Rule] = {
    "aten.cross_entropy_loss": cross_entropy,
    "aten.logsumexp": logsumexp,
    "aten.log_softmax": log_softmax,
    "aten.gather": gather,
    "aten.nll_loss_nd": nll_loss,
    "aten.nll_loss": nll_loss,
    **{f"aten.{name}": elementwise for name in ELEMENTWISE},
}
