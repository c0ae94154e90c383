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
    """Each step of each sample is multiplied with each matrix."""
    x, *others = node.operands
    matrices = [v for v in others if len(v.shape) == 2]
    return 2 * x.numel // x.shape[-1] * sum(v.numel for v in matrices)


def _example(gates: int, x: str, states: str, batch_first: bool) -> str:
    """One layer of width a, without dropout."""
    weights = f"(x({gates} * a, d), x({gates} * a, a), x({gates} * a), x({gates} * a))"
    flags = f"True, 1, 0.0, False, False, {batch_first}"
    return f"input({x}, {states}, {weights}, {flags})"


EXAMPLES = {
    "lstm": _example(4, "x(b, c, d)", "(x(1, b, a), x(1, b, a))", True),
    "gru": _example(3, "x(c, b, d)", "x(1, b, a)", False),
    "rnn_tanh": _example(1, "x(b, c, d)", "x(1, b, a)", True),
    "rnn_relu": _example(1, "x(b, c, d)", "x(1, b, a)", True),
}
OPS = (
    *(Op(f"aten.{n}", HEEDS, rule, x, flops=flops) for n, x in EXAMPLES.items()),
    *(Op(f"aten.{name}_cell", autocast="low") for name in EXAMPLES),
)
