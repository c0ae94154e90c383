"""What a node costs: floating point operations, bytes, and seconds on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .graph import Node, Value
from .ops.attention import ATTENTION, passed_round, ring_of
from .ops.op import is_view, op_of

# Backward costs twice the forward: one product for the input's gradient, one for the
# weight's (Narayanan 2021, appendix).
BACKWARD_WORK = 2.0


def flops(node: Node) -> int:
    """Floating point operations of the forward; a multiply-add counts as two."""
    count = op_of(node).flops
    if count is not None:
        return count(node)
    if is_view(node) or node.op.startswith("comm."):
        return 0
    return sum(v.numel for v in node.results)


def traffic(node: Node) -> int:
    """Bytes read and written by the forward; views are free."""
    if is_view(node):
        return 0
    values = {v.name: v for v in (*node.operands, *node.results)}
    return sum(v.bytes for v in values.values())


def signature(node: Node) -> str:
    """What the cost of a node depends on: `aten.add.Tensor(f32[4,8], f32[8])`."""

    def text(arg: object) -> str:
        if isinstance(arg, tuple):
            return f"[{', '.join(map(text, arg))}]"
        return arg.type if isinstance(arg, Value) else str(arg)

    parts = [text(a) for a in node.args]
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


def weights_of(node: Node) -> frozenset[str]:
    """Names of the operands whose gradients can wait: weights, by their place."""
    names = op_of(node).weights
    names = names(node) if callable(names) else names
    given = (node.arg(name) for name in names.split())
    return frozenset(v.name for v in given if isinstance(v, Value))


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
        backward = BACKWARD_WORK * busy
        weight = backward / 2 if weights_of(node) else 0.0
        return Seconds(busy, backward - weight, weight)

    def gather(self, node: Node, zero: int) -> Seconds:
        """Returns the seconds to gather a parameter for one microbatch, by the stage of
        ZeRO: with 3 it is gathered forward and backward, and from 2 on its gradient is
        scattered; the rest is done once a step."""
        once = sum(v.bytes for v in node.results) / self.link_bytes_per_second
        return Seconds(once * (zero == 3), once * max(0, zero - 1), 0.0)
