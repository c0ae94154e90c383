"""Recurrent networks as torch has them, all steps and layers in one op."""

from __future__ import annotations

from ..graph import Node
from ..ops.notation import letters
from ..ops.op import Op

HEEDS = "input hx params has_biases num_layers dropout train bidirectional batch_first"


def rule(node: Node) -> str | None:
    """Samples are on their own, and steps follow one another."""
    if not node.op.endswith(".input"):
        return None
    steps = "b {0}! {1}!" if node.arg("batch_first") else "{0}! b {1}!"
    states = 2 if "lstm" in node.op else 1
    left = [steps.format("s", "i"), *(f"l! b h{i}!" for i in range(states))]
    for k, weight in enumerate(node.operands[1 + states :]):
        left.append(" ".join(f"w{k}{c}!" for c in letters(len(weight.shape))))
    right = [steps.format("s", "o"), *(f"l! b h{i}!" for i in range(states))]
    return f"{', '.join(left)} -> {', '.join(right)}"


def flops(node: Node) -> int:
    """FLOPs of an LSTM or GRU: each step of a sample is multiplied by each matrix."""
    x, weights = node.operands[0], node.arg("params") or node.named("w_ih w_hh")
    matrices = [v for v in weights if len(v.shape) == 2]
    return 2 * x.numel // x.shape[-1] * sum(v.numel for v in matrices)


def _both(name: str, gates: int, states: str, x: str = "x(b, c, d)") -> tuple[Op, Op]:
    """The op of a layer of width a, without dropout, and the op of one of its steps."""
    weights = f"x({gates} * a, d), x({gates} * a, a), x({gates} * a), x({gates} * a)"
    flags = f"True, 1, 0.0, False, False, {x == 'x(b, c, d)'}"
    layer = f"input({x}, {states.format('1, ')}, ({weights}), {flags})"
    step = f"default(x(b, d), {states.format('')}, {weights})"
    return (
        Op(f"aten.{name}", HEEDS, rule, layer, flops=flops),
        Op(f"aten.{name}_cell", examples=step, flops=flops, autocast="low"),
    )


OPS = (
    *_both("lstm", 4, "(x({0}b, a), x({0}b, a))"),
    *_both("gru", 3, "x({0}b, a)", "x(c, b, d)"),
    *_both("rnn_tanh", 1, "x({0}b, a)"),
    *_both("rnn_relu", 1, "x({0}b, a)"),
)
