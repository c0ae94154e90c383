"""The loss in pieces whose sharding rules are plain.

A vocab-parallel loss then falls out of splitting the logits: a maximum, a sum of
exponentials, a masked lookup and a count of tokens. No rank ever holds the whole logits
or the softmax.

    nll = log(sum exp(x - m)) + m - x[target],   m = max x

The derivative with respect to m is zero, so m counts as a constant (Shoeybi 2019,
section 3, keeps the same three reductions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..capture.decompose_losses import MEAN, REDUCED_RULES, SUM
from ..capture.rewrite import Rewriter, Rule
from ..graph import Node, Value
from ..ops.arguments import arguments


def cross_entropy(rewriter: Rewriter, node: Node) -> Value:
    """aten.cross_entropy_loss(x, target, weight, reduction, ignore_index, ...)."""
    given = arguments(node)
    x, target, smoothing = given["self"], given["target"], given["label_smoothing"]
    x = _classes_last(rewriter, x, node)
    if target.dtype.is_floating_point:
        return _of_probabilities(rewriter, x, given, node)
    emit = _emitter(rewriter, x, node)
    normalizer = _log_sum_exp(rewriter, x, node)
    picked = emit("autopar.pick", x, target, given["ignore_index"], name="picked")
    nll = emit("aten.sub.Tensor", normalizer, picked, name="nll")
    weighed = _weigh(rewriter, nll, given, node)
    if smoothing:
        uniform = _mean_of_classes(rewriter, x, normalizer, given["weight"], node)
        weighed = emit("aten.mul.Tensor", weighed, 1.0 - smoothing, name="nll")
        uniform = emit("aten.mul.Tensor", uniform, smoothing, name="uniform_nll")
        weighed = emit("aten.add.Tensor", weighed, uniform, name="nll")
    return _reduce(rewriter, weighed, given, node)


def _emitter(rewriter: Rewriter, x: Value, node: Node) -> Callable[..., Value]:
    """Emits nodes with a result for each row of x: [..., classes] -> [...]."""

    def emit(op: str, *args: Any, name: str, of: Value | None = None) -> Value:
        shape = x.shape[:-1] if of is None else of.shape
        return rewriter.emit(
            op, *args, shape=shape, dtype=x.dtype, where=node.location, name=name
        )

    return emit


def _mean_of_classes(
    rewriter: Rewriter, x: Value, normalizer: Value, weight: Value | None, node: Node
) -> Value:
    """The mean over classes of (weight times) log(sum exp(x)) - x, for each row."""
    emit, share = _emitter(rewriter, x, node), 1.0 / x.shape[-1]
    if weight is None:
        mean = emit("aten.sum.dim_IntList", x, (-1,), name="sum_logits")
        mean = emit("aten.mul.Tensor", mean, share, name="mean_logits")
        return emit("aten.sub.Tensor", normalizer, mean, name="uniform_nll")
    column = rewriter.reshape(normalizer, (*normalizer.shape, 1), node.location)
    each = emit("aten.sub.Tensor", column, x, name="nll_of_classes", of=x)
    each = emit("aten.mul.Tensor", each, weight, name="weighed_classes", of=x)
    total = emit("aten.sum.dim_IntList", each, (-1,), name="sum_classes")
    return emit("aten.mul.Tensor", total, share, name="uniform_nll")


def _of_probabilities(
    rewriter: Rewriter, x: Value, given: dict[str, Any], node: Node
) -> Value:
    """- sum of target * log_softmax(x) (* weight): target [..., classes] too.

    Unlike with class indices, a mean is one over rows, whatever the weights are.
    """
    emit = _emitter(rewriter, x, node)
    target = _classes_last(rewriter, given["target"], node)
    if smoothing := given["label_smoothing"]:
        target = emit("aten.mul.Tensor", target, 1.0 - smoothing, name="wanted", of=x)
        share = smoothing / x.shape[-1]
        target = emit("aten.add.Tensor", target, share, name="wanted", of=x)
    normalizer = _log_sum_exp(rewriter, x, node)
    column = rewriter.reshape(normalizer, (*x.shape[:-1], 1), node.location)
    each = emit("aten.sub.Tensor", column, x, name="nll_of_classes", of=x)
    each = emit("aten.mul.Tensor", each, target, name="nll_of_classes", of=x)
    if (weight := given["weight"]) is not None:
        each = emit("aten.mul.Tensor", each, weight, name="weighed_classes", of=x)
    nll = emit("aten.sum.dim_IntList", each, (-1,), name="nll")
    if given["reduction"] not in (MEAN, SUM):
        return nll
    where, share = node.location, 1.0 / max(1, nll.numel)
    scalar: dict[str, Any] = {"shape": (), "dtype": x.dtype, "where": where}
    total = rewriter.emit("aten.sum.default", nll, name="total", **scalar)
    if given["reduction"] == SUM:
        return total
    return rewriter.emit("aten.mul.Tensor", total, share, name="loss", **scalar)


def _log_sum_exp(rewriter: Rewriter, x: Value, node: Node) -> Value:
    """x [..., classes] -> [...]."""

    def emit(op: str, *args: Any, like: Value, name: str | None = None) -> Value:
        return rewriter.emit(
            op, *args, shape=like.shape, dtype=x.dtype, where=node.location, name=name
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
    given = arguments(node)
    x, out, where = given["self"], node.out, node.location
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
    index = rewriter.reshape(index, rows[:-1], node.location)
    picked = pick_rows(rewriter, x, index, None, node)
    return rewriter.reshape(picked, rows, node.location)


def pick_rows(
    rewriter: Rewriter, x: Value, index: Value, ignored: int | None, node: Node
) -> Value:
    """x[..., index], anything where the index is `ignored`; of x - y, with one y a row,
    without the difference."""
    rows = x.shape[:-1]

    def emit(op: str, *args: Any) -> Value:
        return rewriter.emit(
            op, *args, shape=rows, dtype=x.dtype, where=node.location, name="picked"
        )

    difference = rewriter.producer(x, "aten.sub")
    if difference is not None and not difference.kwargs:
        from_, by = difference.args
        if isinstance(by, Value) and by.shape == (*rows, 1) and from_.shape == x.shape:
            by = rewriter.reshape(by, rows, node.location)
            return emit(
                "aten.sub.Tensor", emit("autopar.pick", from_, index, ignored), by
            )
    return emit("autopar.pick", x, index, ignored)


def nll_loss(rewriter: Rewriter, node: Node) -> Value:
    """aten.nll_loss_nd(log_probabilities, target, weight, reduction, ignore_index)."""
    given = arguments(node)
    x = _classes_last(rewriter, given["self"], node)
    picked = pick_rows(rewriter, x, given["target"], given["ignore_index"], node)
    nll = _emitter(rewriter, x, node)("aten.neg.default", picked, name="nll")
    return _reduce(rewriter, _weigh(rewriter, nll, given, node), given, node)


def _weigh(rewriter: Rewriter, nll: Value, given: dict[str, Any], node: Node) -> Value:
    """Each row times the weight of its target's class, if classes have weights; those
    of the rows go into `given`, as `weights`."""
    if (weight := given["weight"]) is None:
        return nll
    target, where = given["target"], node.location
    ignored = given["ignore_index"]
    rows: dict[str, Any] = {"shape": nll.shape, "where": where}
    kept = rewriter.emit(
        "aten.ne.Scalar", target, ignored, dtype=torch.bool, name="kept", **rows
    )
    inside = rewriter.emit(
        "aten.where.ScalarOther", kept, target, 0, dtype=target.dtype, **rows
    )
    # No gradient goes to weights of classes.
    weight = rewriter.emit(
        "aten.detach.default",
        weight,
        shape=weight.shape,
        dtype=weight.dtype,
        where=where,
    )
    table = rewriter.reshape(weight, (*weight.shape, 1), where)
    found = rewriter.emit(
        "aten.embedding.default",
        table,
        inside,
        shape=(*nll.shape, 1),
        dtype=weight.dtype,
        where=where,
    )
    found = rewriter.reshape(found, nll.shape, where)
    given["weights"] = rewriter.emit(
        "aten.where.ScalarOther", kept, found, 0.0, dtype=weight.dtype, **rows
    )
    op, name = "aten.mul.Tensor", "weighed_nll"
    return rewriter.emit(op, nll, given["weights"], dtype=nll.dtype, name=name, **rows)


def _classes_last(rewriter: Rewriter, x: Value, node: Node) -> Value:
    """[n, classes, d...] -> [n, d..., classes]."""
    if len(x.shape) <= 2:
        return x
    order = (0, *range(2, len(x.shape)), 1)
    shape = tuple(x.shape[i] for i in order)
    return rewriter.emit(
        "aten.permute.default",
        x,
        order,
        shape=shape,
        dtype=x.dtype,
        where=node.location,
    )


def _reduce(rewriter: Rewriter, nll: Value, given: dict[str, Any], node: Node) -> Value:
    """Leave out the ignored tokens; sum, or divide by the count of the others, or by
    the sum of the weights of their classes.

    The count is read off the target alone, so it can be known ahead of all
    microbatches: that is what makes the mean separable over them.
    """
    where, target, ignored = node.location, given["target"], given["ignore_index"]
    reduction = given["reduction"]

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
    counted, dtype = kept, torch.int64
    if "weights" in given:
        counted, dtype = given["weights"], nll.dtype
    count = emit("aten.sum.default", counted, shape=(), dtype=dtype, name="tokens")
    return emit("aten.div.Tensor", total, count, shape=(), dtype=nll.dtype, name="loss")


LOSS_RULES: dict[str, Rule] = {
    "aten.cross_entropy_loss": cross_entropy,
    "aten.logsumexp": logsumexp,
    "aten.log_softmax": log_softmax,
    "aten.gather": gather,
    "aten.nll_loss_nd": nll_loss,
    "aten.nll_loss": nll_loss,
    **REDUCED_RULES,
}
