"""What a node does: floating point operations and bytes, and seconds as a type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .graph import Node, Value
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
    """Bytes read and written by the forward; views are free, a shard is one too."""
    if is_view(node) or node.op == "comm.shard":
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


class NodeCosts(Protocol):
    """Seconds of nodes by themselves, by which stages are cut."""

    def seconds(self, node: Node) -> Seconds:
        """Those of a node of one rank, with its derivative."""

    def gather(self, node: Node) -> Seconds:
        """Those of a parameter that is gathered for a microbatch, and its gradient."""

    def send(self, size: int) -> float:
        """Those of a message of so many bytes to the next stage."""
