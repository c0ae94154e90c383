"""The sharding rule of every op: which letters flow through it (see `notation`).

To add an op, add a line to `RULES` and an example to the test that proves the rules by
running ops on shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from passes.dims.notation import Equation, parse
from passes.graph import Node, resolve

RULES: dict[str, str] = {
    "aten.linear": "... k+, n k+ -> ... n",
    "aten.bmm": "b m k+, b k+ n -> b m n",
    # k is whole: each partial product would bring in the first operand once.
    "aten.baddbmm": "b m n, b m k!, b k! n -> b m n",
    "aten.embedding": "v@ e, ... -> ... e",
    "aten.triu": "... m! n! -> ... m! n!",
    "aten.tril": "... m! n! -> ... m! n!",
    "aten.view_as_complex": "... two! -> ...",
    "aten.view_as_real": "... -> ... two!",
    "autopar.dropout": "... -> ...",
    "autopar.sum_exp": "... k+, ... -> ...",
    "autopar.pick": "... k@, ... -> ...",
    "autopar.expert_linear": "s k+, s, e@ n k+ -> s n",
    "autopar.choose": "... n! -> ... k!",
    "aten.one_hot": "... -> ... n!",
}


# Composites of pointwise ops, which torch does not tag.
POINTWISE = frozenset(
    {
        "aten.where",
        "aten.to",
        "aten.detach",
        "aten.__and__",
        "aten.__or__",
        "aten.__xor__",
        "aten.square",
        "aten.silu",
        "aten.mish",
        "aten.copy",
        "aten.fill",
        "aten.zero",
        "aten.leaky_relu",  # tagged from torch 2.12 on
        # losses, which `normalize` leaves unreduced
        "aten.mse_loss",
        "aten.l1_loss",
        "aten.smooth_l1_loss",
        "aten.huber_loss",
        "aten.binary_cross_entropy",
        "aten.binary_cross_entropy_with_logits",
        "aten.kl_div",
    }
)


def equation(node: Node) -> Equation | None:
    """The rule of this node, or None if its op has none that fits its operands' ranks.

    Reshapes have no equation: their dims are matched by size, in `name_dims`.
    """
    name = node.name
    text: str | None
    if name in FUNCTIONS:
        text = FUNCTIONS[name](node)
    elif name in RULES:
        text = RULES[name]
    elif is_pointwise(node.op):
        many, outs = (["..."] * len(x) for x in (node.operands, node.outs))
        text = f"{', '.join(many)} -> {', '.join(outs)}"
    else:
        text = None
    return None if text is None else parse(text, node)


def is_pointwise(op: str) -> bool:
    """Whether the op works element by element: torch's own tag, or a known alias."""
    if op.rpartition(".")[0] in POINTWISE:
        return True
    return op.startswith("aten.") and torch.Tag.pointwise in resolve(op).tags


# --- Ops whose rule depends on their arguments -------------------------------------


def letters(count: int, start: str = "a") -> list[str]:
    return [chr(ord(start) + i) for i in range(count)]


def _spell(operand: list[str], out: list[str], copies: int = 1) -> str:
    return f"{' '.join(operand)} -> {', '.join([' '.join(out)] * copies)}"


def _dims(node: Node, name: str = "dim") -> list[int]:
    """The dims argument of a node, as non-negative ints (all dims if it is absent)."""
    rank, given = max(1, len(node.operands[0].shape)), node.arg(name)
    if given is None or given == ():
        return list(range(rank))
    return [d % rank for d in (given if isinstance(given, tuple) else (given,))]


def _reduction(suffix: str) -> Callable[[Node], str]:
    def rule(node: Node) -> str:
        x = letters(len(node.operands[0].shape))
        dims = _dims(node)
        operand = [c + suffix if i in dims else c for i, c in enumerate(x)]
        out = [c for i, c in enumerate(x) if i not in dims]
        if len(node.out.shape) == len(x):  # keepdim
            out = ["_" if i in dims else c for i, c in enumerate(x)]
        return _spell(operand, out)

    return rule


def _along(node: Node, name: str = "dim") -> str:
    """Ops that work along one dim and keep the shape: softmax, cumsum."""
    x = letters(len(node.operands[0].shape))
    both = [c + "!" if i in _dims(node, name) else c for i, c in enumerate(x)]
    return _spell(both, both)


def _top(node: Node) -> str:
    """topk, sort: what comes out along the dim has been all over it."""
    x = letters(len(node.operands[0].shape))
    dim = node.arg("dim") % max(1, len(x))
    operand = [c + "!" if i == dim else c for i, c in enumerate(x)]
    out = [c + "out!" if i == dim else c for i, c in enumerate(x)]
    return _spell(operand, out, len(node.outs))


def _moved(node: Node) -> str:
    """Dims in another order: the one that dims of distinct extents come out in."""
    x = letters(len(node.operands[0].shape))
    extents = range(2, 2 + len(x))
    out = resolve(node.op)(
        torch.empty(tuple(extents), device="meta"), *node.args[1:], **node.kwargs
    )
    return _spell(x, [x[extents.index(n)] for n in out.shape])


def _einsum(node: Node) -> str | None:
    """What it says itself, if no operand has a letter twice."""
    left, arrow, right = (
        node.arg("equation").replace(" ", "").replace("...", ".").partition("->")
    )
    if not arrow:
        once = sorted(c for c in left if c.isalpha() and left.count(c) == 1)
        right = "".join(["." if "." in left else "", *once])
    operands = left.split(",")
    if any(len(set(x)) < len(x) for x in operands) or ("." in left) > ("." in right):
        return None

    def spell(tensor: str) -> str:
        marked = (c if c in right else f"{c}+" for c in tensor)
        return " ".join(marked).replace(".", "...")

    return f"{', '.join(map(spell, operands))} -> {spell(right)}"


def _matmul(node: Node) -> str:
    """Writes the rule of matrices, or of a vector on one side, or on both."""
    left, right = (len(v.shape) for v in node.operands)
    if right == 1:
        return "... k+, k+ -> ..." if left > 1 else "k+, k+ -> "
    return "... m k+, ... k+ n -> ... m n" if left > 1 else "k+, ... k+ n -> ... n"


def _expand(node: Node) -> str:
    out = letters(len(node.out.shape))
    return _spell(out[len(out) - len(node.operands[0].shape) :], out)


def _changed_whole(node: Node) -> str:
    """slice, pad: a dim that grows, shrinks or shifts must be whole."""
    x, y = node.operands[0].shape, node.out.shape
    pads = node.arg("pad") or ()
    padded = {len(x) - 1 - i // 2 for i, count in enumerate(pads) if count}
    operand, out = letters(len(x)), letters(len(x))
    for i, c in enumerate(letters(len(x))):
        if x[i] != y[i] or i in padded:
            operand[i], out[i] = f"{c}!", f"{c}out!"
    return _spell(operand, out)


def _select(node: Node) -> str:
    """select, unbind: one dim goes away."""
    x = letters(len(node.operands[0].shape))
    dim = node.arg("dim") % len(x)
    operand = [c + "!" if i == dim else c for i, c in enumerate(x)]
    out = [c for i, c in enumerate(x) if i != dim]
    return _spell(operand, out, len(node.outs))


def _norm(node: Node) -> str:
    """layer_norm, rms_norm: all dims of the given shape are whole."""
    normal = " ".join(f"{c}!" for c in letters(len(node.arg("normalized_shape"))))
    weights = [normal] * (len(node.operands) - 1)
    return f"{', '.join([f'... {normal}', *weights])} -> ... {normal}"


def _split(node: Node) -> str:
    """Equal pieces split the dim into (which piece, position in it)."""
    x = letters(len(node.operands[0].shape))
    dim = node.arg("dim") % len(x)
    sizes = {v.shape[dim] if v else -1 for v in node.outs}
    if len(sizes) > 1:
        operand = [c + "!" if i == dim else c for i, c in enumerate(x)]
        outs = []
        for piece in range(len(node.outs)):
            out = [f"{c}{piece}!" if i == dim else c for i, c in enumerate(x)]
            outs.append(" ".join(out))
        return f"{' '.join(operand)} -> {', '.join(outs)}"
    count = f"pieces={len(node.outs)}!"
    operand = [f"({count} {c})" if i == dim else c for i, c in enumerate(x)]
    return _spell(operand, x, len(node.outs))


def _cat(node: Node) -> str:
    x = letters(len(node.out.shape))
    dim = node.arg("dim") % len(x)
    operands = []
    for piece in range(len(node.operands)):
        one = [f"{c}{piece}!" if i == dim else c for i, c in enumerate(x)]
        operands.append(" ".join(one))
    out = [f"{c}!" if i == dim else c for i, c in enumerate(x)]
    return f"{', '.join(operands)} -> {' '.join(out)}"


def _stack(node: Node) -> str:
    out = letters(len(node.out.shape))
    dim = node.arg("dim") % len(out)
    operand = " ".join(c for i, c in enumerate(out) if i != dim)
    out[dim] += "!"
    return f"{', '.join([operand] * len(node.operands))} -> {' '.join(out)}"


def _repeat_interleave(node: Node) -> str | None:
    if node.op != "aten.repeat_interleave.self_int":
        return None
    x = letters(len(node.operands[0].shape))
    dim, repeats = node.arg("dim"), node.arg("repeats")
    if dim is None or not isinstance(repeats, int):
        return f"{' '.join(c + '!' for c in x)} -> {'z!'}"
    dim %= len(x)
    out = [f"({c} times={repeats}!)" if i == dim else c for i, c in enumerate(x)]
    return _spell(x, out)


def _gather(node: Node) -> str:
    """gather, scatter: each index points along one dim, in a row of its own."""
    x, _, *source = node.operands
    d = node.arg("dim") % len(x.shape)
    takes = "gather" in node.op
    here, there = letters(len(x.shape)), letters(len(x.shape))
    for i, c in enumerate(letters(len(x.shape))):
        if i == d:
            here[i], there[i] = f"{c}!", f"{c}in" if takes else f"{c}in!"
        elif len({v.shape[i] for v in node.operands}) > 1:
            here[i], there[i] = f"{c}!", f"{c}in!"
    left = [here, *[there] * (1 + len(source))]
    out = there if takes else here
    return f"{', '.join(map(' '.join, left))} -> {' '.join(out)}"


def _max(node: Node) -> str:
    """Writes the rule for all, along a dim (with indices), or of two tensors."""
    if node.op.endswith(".other"):
        return "..., ... -> ..."
    if node.op == "aten.max.default":
        return _reduction("^")(node)
    one = _reduction("!")(replace(node, outs=node.outs[:1]))
    left, right = one.split("->")
    return f"{left}->{', '.join([right] * len(node.outs))}"


def _roll(node: Node) -> str:
    return _along(node, "dims")


def _conv1d(node: Node) -> str:
    """x [b, c, s], w [o, c / groups, k]: a filter of its own for each channel, or all
    channels in each filter."""
    groups = node.arg("groups")
    bias = len(node.operands) > 2
    if groups == node.operands[0].shape[1] == node.out.shape[1]:
        return f"b c s!, c _ k!{', c' if bias else ''} -> b c t!"
    if groups > 1:
        return f"b c! s!, o! d! k!{', o!' if bias else ''} -> b o! t!"
    if bias:  # each partial sum would bring it in
        return "b c! s!, o c! k!, o -> b o t!"
    return "b c+ s!, o c+ k! -> b o t!"


def _recurrent(node: Node) -> str | None:
    """lstm, gru, rnn: samples are on their own, and steps follow one another."""
    if not node.op.endswith(".input"):
        return None
    batch_first = node.arg("batch_first")
    steps = "b {0}! {1}!" if batch_first else "{0}! b {1}!"
    states = 2 if "lstm" in node.op else 1
    left = [steps.format("s", "i"), *(f"l! b h{i}!" for i in range(states))]
    for k, weight in enumerate(node.operands[1 + states :]):
        left.append(" ".join(f"w{k}{c}!" for c in letters(len(weight.shape))))
    right = [steps.format("s", "o"), *(f"l! b h{i}!" for i in range(states))]
    return f"{', '.join(left)} -> {', '.join(right)}"


def _attention(node: Node) -> str:
    """Each query row is on its own, and sees all keys; a causal flag counts rows."""
    q, k = node.args[0], node.args[1]
    is_causal = node.args[4]
    s = "s~" if is_causal else "s"
    groups = k.shape[1]
    kv = "h" if groups == q.shape[1] else f"g={groups}"
    heads = "h" if groups == q.shape[1] else f"({kv} r)"
    operands = [f"b {heads} {s} e!", f"b {kv} t! e!", f"b {kv} t! v!"]
    if node.args[3] is not None:
        rank = len(node.args[3].shape)
        operands.append(" ".join(["b", heads, s, "t!"][4 - rank :]))
    return f"{', '.join(operands)} -> b {heads} {s} v!"


MOVES = [
    "transpose",
    "t",
    "numpy_T",
    "mT",
    "adjoint",
    "permute",
    "movedim",
    "moveaxis",
    "swapaxes",
    "swapdims",
]

FUNCTIONS: dict[str, Callable[[Node], str | None]] = {
    "aten.sum": _reduction("+"),
    "aten.mean": _reduction("!"),
    "aten.amax": _reduction("^"),
    "aten.var": _reduction("!"),
    "aten.softmax": _along,
    "aten._softmax": _along,
    "aten.log_softmax": _along,
    "aten.cumsum": _along,
    "aten.topk": _top,
    "aten.sort": _top,
    **{f"aten.{name}": _moved for name in MOVES},
    "aten.einsum": _einsum,
    "aten.matmul": _matmul,
    "aten.expand": _expand,
    "aten.layer_norm": _norm,
    "aten.rms_norm": _norm,
    "aten.slice": _changed_whole,
    "aten.pad": _changed_whole,
    "aten.constant_pad_nd": _changed_whole,
    "aten.select": _select,
    "aten.unbind": _select,
    "aten.split": _split,
    "aten.chunk": _split,
    "aten.split_with_sizes": _split,
    "aten.cat": _cat,
    "aten.stack": _stack,
    "aten.repeat_interleave": _repeat_interleave,
    "autopar.attention": _attention,
    "aten.gather": _gather,
    "aten.scatter": _gather,
    "aten.scatter_add": _gather,
    "aten.max": _max,
    "aten.min": _max,
    "aten.linalg_vector_norm": _reduction("!"),
    "aten.roll": _roll,
    "aten.conv1d": _conv1d,
    **{f"aten.{name}": _recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}
