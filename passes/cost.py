"""What a node costs: floating point operations, bytes, and seconds on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from passes.dims.rules import equation
from passes.graph import Node, Value, show
from passes.shard.ring import ATTENTION, passed_round, ring_of

VIEWS = frozenset(
    {
        "aten.reshape",
        "aten.transpose",
        "aten.t",
        "aten.permute",
        "aten.expand",
        "aten.split",
        "aten.chunk",
        "aten.slice",
        "aten.select",
        "aten.unbind",
        "aten.detach",
    }
)
# Where the time goes.
PRODUCTS = frozenset(
    {
        "aten.linear",
        "aten.matmul",
        "aten.bmm",
        "aten.baddbmm",
        "aten.einsum",
        "autopar.attention",
        "autopar.expert_linear",
    }
)
# Gradients of weights, added into their first operand.
WEIGHT_GRADS = frozenset(
    {
        "autopar.linear_weight_grad_",
        "autopar.matmul_weight_grad_",
        "comm.expert_weight_grad_",
    }
)
# How many products as large as q k^T, and as large as scores v. The backward makes the
# scores again (Dao 2022, arXiv:2205.14135, appendix B).
PRODUCTS_OF_ATTENTION = {
    "autopar.attention": (1, 1),
    "comm.attention": (1, 1),
    "autopar.attention_backward": (3, 2),
    "comm.attention_backward": (3, 2),
}
# Backward costs twice the forward: one product for the input's gradient, one for the
# weight's (Narayanan 2021, appendix).
BACKWARD = 2.0


def flops(node: Node) -> int:
    """Floating point operations of the forward; a multiply-add counts as two."""
    name = node.name
    if name in ("aten.linear", "aten.matmul", "aten.bmm", "aten.mm"):
        return 2 * node.out.numel * node.operands[0].shape[-1]
    if name == "aten.einsum" and (rule := equation(node)) is not None:
        extents = {
            letters: n
            for v, dims in zip(node.operands, rule.operands, strict=True)
            for letters, n in zip(dims, v.shape, strict=True)
        }
        return 2 * prod(extents.values())
    if node.op == "autopar.affine" or node.op.endswith("linear_transposed"):
        return 2 * node.out.numel * node.operands[0].shape[-1]
    if node.op.endswith(".expert_linear"):
        return 2 * node.out.numel * node.operands[0].shape[-1]
    if node.op in WEIGHT_GRADS:
        first, second = node.operands[1:3]
        return 2 * first.numel * second.shape[-1]
    if node.op in PRODUCTS_OF_ATTENTION:
        return _attention_flops(node)
    if name in VIEWS or node.op.startswith("comm."):
        return 0
    return sum(v.numel for v in node.results)


def _attention_flops(node: Node) -> int:
    """Counts all keys, or a window of them: a ring has a share of them at a time. Not
    discounted for causality, as in the published formulas."""
    is_backward = node.op.endswith("_backward")
    q, k, v = node.operands[1:4] if is_backward else node.operands[:3]
    columns = k.shape[-2]
    if node.op.startswith("comm."):
        columns = prod(extent for extent, _ in node.args[-3])
    columns = min(columns, node.kwargs.get("window", columns))
    rows = q.numel // q.shape[-1]
    scores, values = PRODUCTS_OF_ATTENTION[node.op]
    return 2 * rows * columns * (scores * q.shape[-1] + values * v.shape[-1])


def traffic(node: Node) -> int:
    """Bytes read and written by the forward; views are free."""
    if node.name in VIEWS:
        return 0
    values = {v.name: v for v in (*node.operands, *node.results)}
    return sum(v.bytes for v in values.values())


def signature(node: Node) -> str:
    """What the cost of a node depends on: `aten.add.Tensor(f32[4,8], f32[8])`."""

    def text(arg: object) -> str:
        return arg.type if isinstance(arg, Value) else show(arg)

    parts = [
        f"[{', '.join(map(text, a))}]" if isinstance(a, tuple) else text(a)
        for a in node.args
    ]
    parts += [f"{k}={text(v)}" for k, v in node.kwargs.items()]
    return f"{node.op}({', '.join(parts)})"


@dataclass(frozen=True)
class Seconds:
    """Seconds of one microbatch: forward, and the two halves of the backward."""

    forward: float
    input_half: float
    weight_half: float

    @property
    def backward(self) -> float:
        return self.input_half + self.weight_half

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.forward + other.forward,
            self.input_half + other.input_half,
            self.weight_half + other.weight_half,
        )


NOTHING = Seconds(0.0, 0.0, 0.0)


# Of ops with weights: which operands these are. Their gradients are the weight half.
WEIGHTS: dict[str, slice] = {
    "aten.linear": slice(1, None),
    "aten.layer_norm": slice(1, None),
    "aten.rms_norm": slice(1, None),
    "aten.embedding": slice(0, 1),
    "autopar.expert_linear": slice(2, 3),
    "comm.expert_linear": slice(2, 3),
}


def weights_of(node: Node) -> frozenset[str]:
    """Names of the operands whose gradients can wait: weights, by their place."""
    name = node.name
    operands = node.operands
    # x [.., k] @ w [k, n]: a product with a matrix is one with a weight.
    if name == "aten.matmul" and len(operands) == 2 and len(operands[1].shape) == 2:
        return frozenset({operands[1].name})
    place = WEIGHTS.get(node.op) or WEIGHTS.get(name, slice(0))
    return frozenset(v.name for v in operands[place])


@dataclass(frozen=True)
class Costs:
    """Seconds of a node, forward and backward: measured, else from the roofline.

    measured: `signature` -> seconds of one forward and one backward.
    """

    measured: Mapping[str, Seconds] = field(default_factory=dict)
    flops_per_second: float = 5e10
    bytes_per_second: float = 1e10
    link_bytes_per_second: float = 1e9

    def seconds(self, node: Node) -> Seconds:
        known = self.measured.get(signature(node))
        if known is not None:
            return known
        if node.op.startswith("comm.") and node.op != ATTENTION:
            moved = sum(v.bytes for v in node.results)
            once = moved / self.link_bytes_per_second
            return Seconds(once, once, 0.0)
        busy = max(
            flops(node) / self.flops_per_second, traffic(node) / self.bytes_per_second
        )
        if ring_of(node) is not None:
            # Backward keys and values go round again, and their gradients with them,
            # all while something is computed.
            sent = sum(size for *_, size in passed_round(node))
            busy = max(busy, sent / self.link_bytes_per_second)
        backward = BACKWARD * busy
        weight = backward / 2 if weights_of(node) else 0.0
        return Seconds(busy, backward - weight, weight)

    def gather(self, node: Node, zero: int) -> Seconds:
        """Returns the seconds to gather a parameter for one microbatch, by the stage of
        ZeRO: with 3 it is gathered forward and backward, and from 2 on its gradient is
        scattered; the rest is done once a step."""
        once = sum(v.bytes for v in node.results) / self.link_bytes_per_second
        return Seconds(once * (zero == 3), once * max(0, zero - 1), 0.0)
