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

from ...graph import Node, Value
from ...ops.arguments import arguments, call
from ...ops.op import OPS
from ...rewrite import Rewriter, Rule

PICK = "autopar.pick"
NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


def cross_entropy(rewriter: Rewriter, node: Node) -> Value:
    """aten.cross_entropy_loss(x, target, weight, reduction, ignore_index, ...)."""
    bound = arguments(node)
    x, target, smoothing = bound["self"], bound["target"], bound["label_smoothing"]
    x = _classes_last(rewriter, x)
    if target.dtype.is_floating_point:
        return _of_probabilities(rewriter, x, bound)
    emit = rewriter.emit
    normalizer = _log_sum_exp(rewriter, x)
    picked = emit(PICK, x, target, bound["ignore_index"], name="picked")
    nll = emit("aten.sub.Tensor", normalizer, picked, name="nll")
    weighed = _weigh(rewriter, nll, bound)
    if smoothing:
        uniform = _mean_of_classes(rewriter, x, normalizer, bound["weight"])
        weighed = emit("aten.mul.Tensor", weighed, 1.0 - smoothing, name="nll")
        uniform = emit("aten.mul.Tensor", uniform, smoothing, name="uniform_nll")
        weighed = emit("aten.add.Tensor", weighed, uniform, name="nll")
    return _reduce(rewriter, weighed, bound)


def _mean_of_classes(
    rewriter: Rewriter, x: Value, normalizer: Value, weight: Value | None
) -> Value:
    """The mean over classes of (weight times) log(sum exp(x)) - x, for each row."""
    emit, share = rewriter.emit, 1.0 / x.shape[-1]
    if weight is None:
        mean = emit("aten.sum.dim_IntList", x, (-1,), name="sum_logits")
        mean = emit("aten.mul.Tensor", mean, share, name="mean_logits")
        return emit("aten.sub.Tensor", normalizer, mean, name="uniform_nll")
    column = rewriter.reshape(normalizer, (*normalizer.shape, 1))
    each = emit("aten.sub.Tensor", column, x, name="nll_of_classes")
    each = emit("aten.mul.Tensor", each, weight, name="weighed_classes")
    total = emit("aten.sum.dim_IntList", each, (-1,), name="sum_classes")
    return emit("aten.mul.Tensor", total, share, name="uniform_nll")


def _of_probabilities(rewriter: Rewriter, x: Value, bound: dict[str, Any]) -> Value:
    """- sum of target * log_softmax(x) (* weight): target [..., classes] too.

    Unlike with class indices, a mean is one over rows, whatever the weights are.
    """
    emit = rewriter.emit
    target = _classes_last(rewriter, bound["target"])
    if smoothing := bound["label_smoothing"]:
        target = emit("aten.mul.Tensor", target, 1.0 - smoothing, name="wanted")
        share = smoothing / x.shape[-1]
        target = emit("aten.add.Tensor", target, share, name="wanted")
    normalizer = _log_sum_exp(rewriter, x)
    column = rewriter.reshape(normalizer, (*x.shape[:-1], 1))
    each = emit("aten.sub.Tensor", column, x, name="nll_of_classes")
    each = emit("aten.mul.Tensor", each, target, name="nll_of_classes")
    if (weight := bound["weight"]) is not None:
        each = emit("aten.mul.Tensor", each, weight, name="weighed_classes")
    nll = emit("aten.sum.dim_IntList", each, (-1,), name="nll")
    if bound["reduction"] not in (MEAN, SUM):
        return nll
    total = emit("aten.sum.default", nll, name="total")
    if bound["reduction"] == SUM:
        return total
    return emit("aten.mul.Tensor", total, 1.0 / max(1, nll.numel), name="loss")


def _log_sum_exp(rewriter: Rewriter, x: Value) -> Value:
    """x [..., classes] -> [...]."""
    free = rewriter.emit("aten.detach.default", x)
    largest = rewriter.emit("aten.amax.default", free, (-1,), name="largest")
    total = rewriter.emit("autopar.sum_exp", x, largest, name="sum_exp")
    log = rewriter.emit("aten.log.default", total, name="log")
    return rewriter.emit("aten.add.Tensor", log, largest, name="logsumexp")


def logsumexp(rewriter: Rewriter, node: Node) -> Value | None:
    """logsumexp along the last dim: of logits, for a loss that keeps them small
    (z-loss)."""
    x, dims = node.operands[0], node.arg("dim")
    if dims not in ((-1,), (len(x.shape) - 1,)) or node.out.shape != x.shape[:-1]:
        return None
    return _log_sum_exp(rewriter, x)


def log_softmax(rewriter: Rewriter, node: Node) -> Value | None:
    """log_softmax along the last dim -> x - log(sum exp(x)), as in a loss."""
    bound = arguments(node)
    x, out = bound["self"], node.out
    if bound["dim"] % max(1, len(x.shape)) != len(x.shape) - 1:
        return None
    if x.dtype != out.dtype:
        x = rewriter.like(node, "aten.to.dtype", x, out.dtype)
    total = _log_sum_exp(rewriter, x)
    total = rewriter.reshape(total, (*x.shape[:-1], 1))
    return rewriter.like(node, "aten.sub.Tensor", x, total)


def gather(rewriter: Rewriter, node: Node) -> Value | None:
    """One element of each row, as a loss by hand looks its targets up."""
    x, dim, index = node.named("self dim index")
    rows = (*x.shape[:-1], 1)
    last = len(x.shape) - 1
    if not x.shape or dim % len(x.shape) != last or index.shape != rows:
        return None
    if not x.dtype.is_floating_point:
        return None
    index = rewriter.reshape(index, rows[:-1])
    picked = pick_rows(rewriter, x, index, None)
    return rewriter.reshape(picked, rows)


def pick_rows(rewriter: Rewriter, x: Value, index: Value, ignored: int | None) -> Value:
    """x[..., index], anything where the index is `ignored`; of x - y, with one y a row,
    without the difference."""
    rows = x.shape[:-1]
    difference = rewriter.producer(x, "aten.sub")
    if difference is not None and not difference.kwargs:
        from_, by = difference.named("self other")
        if isinstance(by, Value) and by.shape == (*rows, 1) and from_.shape == x.shape:
            by = rewriter.reshape(by, rows)
            picked = rewriter.emit(PICK, from_, index, ignored, name="picked")
            return rewriter.emit("aten.sub.Tensor", picked, by, name="picked")
    return rewriter.emit(PICK, x, index, ignored, name="picked")


def nll_loss(rewriter: Rewriter, node: Node) -> Value:
    """aten.nll_loss_nd(log_probabilities, target, weight, reduction, ignore_index)."""
    bound = arguments(node)
    x = _classes_last(rewriter, bound["self"])
    picked = pick_rows(rewriter, x, bound["target"], bound["ignore_index"])
    nll = rewriter.emit("aten.neg.default", picked, name="nll")
    return _reduce(rewriter, _weigh(rewriter, nll, bound), bound)


def _weigh(rewriter: Rewriter, nll: Value, bound: dict[str, Any]) -> Value:
    """Multiplies each row by the weight of its target's class, if classes have weights;
    `bound` gets the weights of the rows, as `weights`."""
    if (weight := bound["weight"]) is None:
        return nll
    target, emit, where = bound["target"], rewriter.emit, "aten.where.ScalarOther"
    kept = emit("aten.ne.Scalar", target, bound["ignore_index"], name="kept")
    inside = emit(where, kept, target, 0)
    # No gradient goes to weights of classes.
    weight = emit("aten.detach.default", weight)
    table = rewriter.reshape(weight, (*weight.shape, 1))
    weights = emit("aten.embedding.default", table, inside)
    weights = rewriter.reshape(weights, nll.shape)
    bound["weights"] = emit(where, kept, weights, 0.0)
    return emit("aten.mul.Tensor", nll, bound["weights"], name="weighed_nll")


def _classes_last(rewriter: Rewriter, x: Value) -> Value:
    """[n, classes, d...] -> [n, d..., classes]."""
    if len(x.shape) <= 2:
        return x
    return rewriter.emit("aten.permute.default", x, (0, *range(2, len(x.shape)), 1))


def _reduce(rewriter: Rewriter, nll: Value, bound: dict[str, Any]) -> Value:
    """Leave out the ignored tokens; sum, or divide by the count of the others, or by
    the sum of the weights of their classes.

    The count is read off the target alone, so it can be known ahead of all
    microbatches: that is what makes the mean separable over them.
    """
    emit, reduction = rewriter.emit, bound["reduction"]
    kept = emit("aten.ne.Scalar", bound["target"], bound["ignore_index"], name="kept")
    nll = emit("aten.where.ScalarOther", kept, nll, 0.0, name="kept_nll")
    if reduction not in (MEAN, SUM):
        return nll
    total = emit("aten.sum.default", nll, name="total")
    if reduction == SUM:
        return total
    count = emit("aten.sum.default", bound.get("weights", kept), name="tokens")
    return emit("aten.div.Tensor", total, count, name="loss")


def reduced(rewriter: Rewriter, node: Node) -> Value | None:
    """Replaces a loss's sum or mean by that of its unreduced form: a sum may stay
    pending over ranks and microbatches, and its number of terms is known."""
    bound = arguments(node)
    reduction = bound["reduction"]
    if reduction not in (MEAN, SUM):
        return None
    args, kwargs = call(node.op, {**bound, "reduction": NONE})
    loss = rewriter.emit(node.op, *args, **kwargs)
    total = rewriter.emit("aten.sum.default", loss, name="total")
    if reduction == SUM:
        return total
    share = 1.0 / max(1, loss.numel)
    return rewriter.emit("aten.mul.Tensor", total, share, name="loss")


LOSS_RULES: dict[str, Rule] = {
    "aten.cross_entropy_loss": cross_entropy,
    "aten.logsumexp": logsumexp,
    "aten.log_softmax": log_softmax,
    "aten.gather": gather,
    "aten.nll_loss_nd": nll_loss,
    "aten.nll_loss": nll_loss,
    # The mean of others is that of their elements.
    **{
        name: reduced
        for name, op in OPS.items()
        if name.startswith("aten.") and "reduction" in op.heeds and not op.labels
    },
}
