"""Every sharding rule, proved by running its op on shards.

Safe: shards of each letter that a rule lets split recombine to the whole result. Not
needlessly whole: no other letter could be split. A new op is a line in the table of
rules and one in `EXAMPLES`.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from passes.dims.formulas import evaluate
from passes.dims.linearity import passes_pending_sum
from passes.dims.notation import Equation
from passes.dims.probe import holds, letter_extents, random_operands
from passes.dims.rules import FUNCTIONS, RULES, equation
from passes.graph import Node, Value

SEEDS = range(3)
Example = Callable[[int, int, int, int], Node]  # of extents a < b < c < d
_count = itertools.count()


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Value:
    return Value(f"x{next(_count)}", shape, dtype)


def ints(*shape: int) -> Value:
    return x(*shape, dtype=torch.int64)


def bools(*shape: int) -> Value:
    return x(*shape, dtype=torch.bool)


def node(op: str, *args: object, **kwargs: object) -> Node:
    """A node whose results have the shapes that the op gives them."""
    bare = Node(op, args, kwargs, ())
    results = evaluate(bare, random_operands(bare, 0))
    assert all(y is not None for y in results)
    return replace(bare, outs=tuple(x(*y.shape, dtype=y.dtype) for y in results))


def einsum(text: str, *operands: Value) -> Node:
    return node("aten.einsum.default", text, operands)


UNARY = (
    "relu tanh sigmoid exp log sqrt rsqrt neg abs silu gelu erf cos sin square mish "
    "reciprocal isnan detach clone zero hardtanh softplus log1p leaky_relu"
)
BINARY = (
    "add.Tensor sub.Tensor mul.Tensor div.Tensor eq.Tensor ne.Tensor lt.Tensor "
    "ge.Tensor remainder.Tensor atan2.default maximum.default"
)
LOGICAL = "__and__.Tensor __or__.Tensor __xor__.Tensor bitwise_and.Tensor"


def each(words: str, make: Callable[[str, int, int, int], Node]) -> list[Example]:
    """An example for each op of a list."""
    return [lambda a, b, c, d, op=op: make(op, a, b, c) for op in words.split()]


POINTWISE: list[Example] = [
    *each(UNARY, lambda op, a, b, c: node(f"aten.{op}.default", x(a, b))),
    *each(BINARY, lambda op, a, b, c: node(f"aten.{op}", x(c, 1, b), x(a, 1))),
    *each(LOGICAL, lambda op, a, b, c: node(f"aten.{op}", bools(b, 1), bools(c))),
    lambda a, b, c, d: node("aten.copy.default", x(a, b), x(b)),
    lambda a, b, c, d: node("aten.fill.Scalar", x(a, b), 2.0),
    lambda a, b, c, d: node("aten.ne.Scalar", ints(a, b), 1),
    lambda a, b, c, d: node("aten.clamp.default", x(a, b), -1.0, 1.0),
    lambda a, b, c, d: node("aten.mul.Tensor", x(a, b), 0.5),
    lambda a, b, c, d: node("aten.add.Tensor", x(a, b), 0.5),
    lambda a, b, c, d: node("aten.sub.Tensor", x(a, b), x(a, b), alpha=2),
    lambda a, b, c, d: node("aten.div.Tensor", x(a, b), 0.5),
    lambda a, b, c, d: node("aten.div.Tensor_mode", x(a), x(a), rounding_mode="floor"),
    lambda a, b, c, d: node("aten.pow.Tensor_Scalar", x(a, b), 2),
    lambda a, b, c, d: node("aten.logical_not.default", bools(a, b)),
    lambda a, b, c, d: node("aten.where.self", bools(b, 1), x(b, c), x(c)),
    lambda a, b, c, d: node("aten.where.ScalarOther", bools(b), x(b), 0.0),
    lambda a, b, c, d: node("aten.masked_fill.Scalar", x(c, b), bools(b), -1.0),
    lambda a, b, c, d: node("aten.to.dtype", x(a, b), torch.bfloat16),
    lambda a, b, c, d: node("aten.to.dtype", x(a, b), torch.float64),
    lambda a, b, c, d: node("aten.gelu.default", x(a, b), approximate="tanh"),
]

EXAMPLES: list[Example] = [
    lambda a, b, c, d: node("aten.linear.default", x(a, b, c), x(d, c)),
    lambda a, b, c, d: node("aten.matmul.default", x(a, b, c), x(c, d)),
    lambda a, b, c, d: node("aten.matmul.default", x(a, b, c), x(c)),
    lambda a, b, c, d: node("aten.matmul.default", x(c), x(a, b, c, d)),
    lambda a, b, c, d: node("aten.matmul.default", x(c), x(c)),
    lambda a, b, c, d: node("aten.matmul.default", x(a, 1, b, c), x(1, d, c, b)),
    lambda a, b, c, d: node("aten.bmm.default", x(a, b, c), x(a, c, d)),
    lambda a, b, c, d: node(
        "aten.baddbmm.default", x(a, b, d), x(a, b, c), x(a, c, d), beta=2, alpha=3
    ),
    lambda a, b, c, d: node("aten.embedding.default", x(a, d), ints(b, c)),
    lambda a, b, c, d: node("aten.layer_norm.default", x(a, b, c), (c,), x(c), x(c)),
    lambda a, b, c, d: node("aten.layer_norm.default", x(a, b, c), (b, c)),
    lambda a, b, c, d: node("aten.rms_norm.default", x(a, b, c), (c,), x(c)),
    lambda a, b, c, d: node("aten.rms_norm.default", x(a, b, c), (c,)),
    lambda a, b, c, d: node("aten.triu.default", x(a, b, c), 1),
    lambda a, b, c, d: node("aten.tril.default", x(b, b)),
    lambda a, b, c, d: node("autopar.sum_exp", x(a, b, c), x(a, b)),
    lambda a, b, c, d: node("autopar.pick", x(b, c, a), ints(b, c)),
    lambda a, b, c, d: node("autopar.expert_linear", x(b, c), ints(b), x(a, d, c)),
    lambda a, b, c, d: node("aten.one_hot.default", ints(b, c), d),
    lambda a, b, c, d: node("aten.topk.default", x(a, b, c), 2),
    lambda a, b, c, d: node("autopar.choose", x(a, b, c), 2),
    lambda a, b, c, d: node("aten.gather.default", x(a, b, c), -1, ints(a, b, d)),
    lambda a, b, c, d: node("aten.topk.default", x(a, c, b), 2, 1),
    lambda a, b, c, d: node("aten.sort.default", x(a, b, c), 0),
    lambda a, b, c, d: node("aten.sum.default", x(a, b)),
    lambda a, b, c, d: node("aten.sum.default", bools(a, b)),
    lambda a, b, c, d: node("aten.sum.dim_IntList", x(a, b, c), (0, -1)),
    lambda a, b, c, d: node("aten.sum.dim_IntList", x(a, b, c), (-2,), True),
    lambda a, b, c, d: node("aten.sum.default", x(a, b), dtype=torch.int64),
    lambda a, b, c, d: node("aten.mean.default", x(a, b)),
    lambda a, b, c, d: node("aten.mean.dim", x(a, b, c), (-1,), True),
    lambda a, b, c, d: node("aten.amax.default", x(a, b, c), (-1,)),
    lambda a, b, c, d: node("aten.amax.default", x(a, b), (0,), keepdim=True),
    lambda a, b, c, d: node("aten.var.default", x(a, b), False),
    lambda a, b, c, d: node("aten.var.dim", x(a, b, c), (-1,), False, True),
    lambda a, b, c, d: node("aten.var.correction", x(a, b), (1,), correction=0),
    lambda a, b, c, d: node("aten.softmax.int", x(a, b, c), -1),
    lambda a, b, c, d: node("aten._softmax.default", x(a, b, c), 1, False),
    lambda a, b, c, d: node("aten.log_softmax.int", x(a, b, c), 0),
    lambda a, b, c, d: node("aten.cumsum.default", x(a, b, c), 1),
    lambda a, b, c, d: node("aten.transpose.int", x(a, b, c), -1, 0),
    lambda a, b, c, d: node("aten.t.default", x(a, b)),
    lambda a, b, c, d: node("aten.numpy_T.default", x(a, b)),
    lambda a, b, c, d: node("aten.permute.default", x(a, b, c), (2, 0, -2)),
    lambda a, b, c, d: node("aten.mT.default", x(a, b, c)),
    lambda a, b, c, d: node("aten.adjoint.default", x(a, b, c)),
    lambda a, b, c, d: node("aten.movedim.int", x(a, b, c, d), -2, 0),
    lambda a, b, c, d: node("aten.movedim.intlist", x(a, b, c), (0, 1), (2, 0)),
    lambda a, b, c, d: node("aten.moveaxis.int", x(a, b, c), 0, -1),
    lambda a, b, c, d: node("aten.swapaxes.default", x(a, b, c), 0, -1),
    lambda a, b, c, d: node("aten.swapdims.default", x(a, b, c), 1, 2),
    lambda a, b, c, d: einsum("bid,bjd->bij", x(a, b, d), x(a, c, d)),
    lambda a, b, c, d: einsum("... i, i j", x(a, b, c), x(c, d)),
    lambda a, b, c, d: einsum("ij,jk,kl", x(a, b), x(b, c), x(c, d)),
    lambda a, b, c, d: einsum("i...,j->j...", x(a, b, c), x(d)),
    lambda a, b, c, d: node("aten.view_as_complex.default", x(a, b, 2)),
    lambda a, b, c, d: node(
        "aten.view_as_real.default", x(a, b, dtype=torch.complex64)
    ),
    lambda a, b, c, d: node("aten.expand.default", x(a, 1, c), (d, a, b, -1)),
    lambda a, b, c, d: node("aten.slice.Tensor", x(c, d), 1, 1, a),
    lambda a, b, c, d: node("aten.slice.Tensor", x(c, d), 0, 0, 2**63 - 1),
    lambda a, b, c, d: node("aten.slice.Tensor", x(c, d), 1, 0, 2**63 - 1, 2),
    lambda a, b, c, d: node("aten.pad.default", x(a, b, c), (1, 2, 0, 0)),
    lambda a, b, c, d: node("aten.pad.default", x(a, b, c), (0, 0, 1, -1)),
    lambda a, b, c, d: node("aten.constant_pad_nd.default", x(a, b), (0, -1), 1.0),
    lambda a, b, c, d: node("aten.select.int", x(a, b, c), -1, 1),
    lambda a, b, c, d: node("aten.unbind.int", x(a, b, c)),
    lambda a, b, c, d: node("aten.unbind.int", x(a, b, c), -1),
    lambda a, b, c, d: node("aten.split.Tensor", x(b, 3 * c), c, -1),
    lambda a, b, c, d: node("aten.split.Tensor", x(3 * c, b), c),
    lambda a, b, c, d: node("aten.split.Tensor", x(b, 2 * c + 1), c, 1),
    lambda a, b, c, d: node("aten.chunk.default", x(b, 2 * c), 2, 1),
    lambda a, b, c, d: node("aten.split_with_sizes.default", x(b, 2 * c), (c, c), 1),
    lambda a, b, c, d: node("aten.split_with_sizes.default", x(b, c + d), (c, d), 1),
    lambda a, b, c, d: node("aten.cat.default", (x(a, b), x(a, c)), -1),
    lambda a, b, c, d: node("aten.cat.default", (x(a, b), x(a, b), x(a, b)), 1),
    lambda a, b, c, d: node("aten.stack.default", (x(a, b), x(a, b)), 1),
    lambda a, b, c, d: node("aten.stack.default", (x(a, b), x(a, b)), dim=-1),
    lambda a, b, c, d: node("aten.repeat_interleave.self_int", x(a, b, c), 3, dim=1),
    lambda a, b, c, d: node("aten.repeat_interleave.self_int", x(a, b), 2),
    lambda a, b, c, d: node("aten.gather.default", x(b, c), 1, ints(b, d)),
    lambda a, b, c, d: node("aten.gather.default", x(b, c, d), 0, ints(a, c, d)),
    lambda a, b, c, d: node("aten.gather.default", x(c, d), 1, ints(b, d)),
    lambda a, b, c, d: node("aten.scatter.value", x(b, d), 1, ints(b, c), -99.0),
    lambda a, b, c, d: node("aten.scatter.src", x(b, d), 1, ints(b, a), x(b, a)),
    lambda a, b, c, d: node(
        "aten.scatter_add.default", x(c, d), 0, ints(a, d), x(a, d)
    ),
    lambda a, b, c, d: node("aten.max.dim", x(a, b, c), -1),
    lambda a, b, c, d: node("aten.min.dim", x(a, b, c), 0, True),
    lambda a, b, c, d: node("aten.max.default", x(a, b)),
    lambda a, b, c, d: node("aten.max.other", x(a, 1, b), x(c, 1)),
    lambda a, b, c, d: node("aten.linalg_vector_norm.default", x(a, b), 2.0),
    lambda a, b, c, d: node(
        "aten.linalg_vector_norm.default", x(a, b), 2.0, (1,), True
    ),
    lambda a, b, c, d: node("aten.roll.default", x(a, b, c), (1,), (1,)),
    lambda a, b, c, d: node("aten.roll.default", x(a, b), (1,)),
    lambda a, b, c, d: recurrent("lstm", 4, x(b, c, d), a, 2),
    lambda a, b, c, d: recurrent("gru", 3, x(c, b, d), a, 1, batch_first=False),
    lambda a, b, c, d: recurrent("rnn_tanh", 1, x(b, c, d), a, 1),
    lambda a, b, c, d: recurrent("rnn_relu", 1, x(b, c, d), a, 1),
    lambda a, b, c, d: conv1d(x(a, b, d), x(b, 1, 2), x(b), groups=b),
    lambda a, b, c, d: conv1d(x(a, b, d), x(c, b, 2)),
    lambda a, b, c, d: conv1d(x(a, b, d), x(c, b, 2), x(c)),
    lambda a, b, c, d: conv1d(x(a, 2 * b, d), x(2 * c, b, 2), groups=2),
    lambda a, b, c, d: attention(a, 3, 3, b, c, None, False),
    lambda a, b, c, d: attention(a, 2, 2, b, b, None, True),
    lambda a, b, c, d: attention(a, 6, 2, b, c, None, False),
    lambda a, b, c, d: attention(2, 4, 1, b, b, None, True),
    lambda a, b, c, d: attention(a, 2, 2, b, c, bools(b, c), False),
    lambda a, b, c, d: attention(a, 6, 2, b, c, x(a, 6, b, c), False),
    lambda a, b, c, d: attention(a, 6, 2, b, c, bools(a, 1, b, c), False),
]

ALL = EXAMPLES + POINTWISE


def conv1d(*operands: Value, groups: int = 1) -> Node:
    bias = operands[2] if len(operands) > 2 else None
    x, weight = operands[:2]
    return node("aten.conv1d.default", x, weight, bias, (1,), (1,), (1,), groups)


def recurrent(
    name: str, gates: int, steps: Value, width: int, states: int, batch_first=True
) -> Node:
    """One layer of a recurrent network, without dropout."""
    batch = steps.shape[0 if batch_first else 1]
    held = tuple(x(1, batch, width) for _ in range(states))
    many = gates * width
    weights = x(many, steps.shape[-1]), x(many, width), x(many), x(many)
    hx = held if states > 1 else held[0]
    flags = True, 1, 0.0, False, False, batch_first
    return node(f"aten.{name}.input", steps, hx, weights, *flags)


# Rules that tests on shards cannot speak about.
PROVED_ELSEWHERE = {
    "autopar.dropout": "its mask is a function of the global position of each element",
}
# (op, letter) that could be split and is kept whole.
WHOLE_ON_PURPOSE = {
    ("autopar.attention", "v"): "every rank would compute all the scores anew",
}


def attention(
    b: int, h: int, g: int, s: int, t: int, mask: Value | None, causal: bool
) -> Node:
    """The value's width differs from the key's, so that letters cannot be confused."""
    qkv = (x(b, h, s, 3), x(b, g, t, 3), x(b, g, t, 5))
    return node("autopar.attention", *qkv, mask, causal, 0.6)


def draws(example: Example) -> list[Node]:
    """The example at several sizes."""
    found = []
    for seed in SEEDS:
        sizes = sorted(random.Random(seed).sample(range(2, 8), 4))
        found.append(example(*sizes))
    return found


def op_name(one: Node) -> str:
    return one.op if one.op.startswith("autopar.") else one.name


def label(example: Example) -> str:
    one = example(2, 3, 4, 5)
    return f"{one.op}({', '.join(str(list(v.shape)) for v in one.operands)})"


def rule_of(one: Node) -> Equation:
    rule = equation(one)
    assert rule is not None, f"{one} has no rule"
    return rule


def splittable(one: Node, rule: Equation) -> list[str]:
    extents = letter_extents(one, rule)
    return [a for a in rule.roles if extents.get(a, 1) > 1]


def test_every_rule_has_an_example() -> None:
    shown = {op_name(example(2, 3, 4, 5)) for example in EXAMPLES}
    assert {*RULES, *FUNCTIONS} - shown - PROVED_ELSEWHERE.keys() == set()


@pytest.mark.parametrize("example", ALL, ids=label)
def test_shards_of_every_splittable_letter_recombine(example: Example) -> None:
    for one in draws(example):
        rule = rule_of(one)
        for letter in splittable(one, rule):
            role = rule.roles[letter]
            if role != "whole":
                for seed in SEEDS:
                    assert holds(one, rule, letter, role, seed), (str(one), letter)


@pytest.mark.parametrize("example", ALL, ids=label)
def test_no_letter_is_whole_that_could_be_split(example: Example) -> None:
    for one in draws(example):
        rule = rule_of(one)
        for letter in splittable(one, rule):
            if rule.roles[letter] != "whole":
                continue
            # A letter of the results alone changes nothing in what the op computes.
            taken = any(letter in names for dims in rule.operands for names in dims)
            possible = [
                role
                for role in (("map", "sum", "max") if taken else ("map",))
                if all(holds(one, rule, letter, role, seed) for seed in SEEDS)
            ]
            expected = ["map"] if (op_name(one), letter) in WHOLE_ON_PURPOSE else []
            assert possible == expected, (str(one), letter)


# --- Which ops a pending sum may pass ----------------------------------------------

RESHAPES: list[Example] = [
    lambda a, b, c, d: node("aten.reshape.default", x(a, b), (a * b,)),
]
# Linear ops that no pending sum passes: no model has needed it on the way to its loss.
NOT_PASSED = {
    *("aten.baddbmm", "aten.clone", "aten.constant_pad_nd", "aten.copy"),
    *("aten.cumsum", "aten.embedding", "aten.gather", "aten.layer_norm", "aten.mean"),
    *("aten.pad", "aten.repeat_interleave", "aten.rms_norm", "aten.tril", "aten.triu"),
    *("aten.where", "aten.zero", "autopar.attention", "autopar.expert_linear"),
    *("autopar.pick", "aten.gather", "aten.scatter", "aten.scatter_add", "aten.roll"),
    "aten.conv1d",
}


def is_linear(one: Node, pending: list[bool], seed: int) -> bool:
    """f(x + x') = f(x) + f(x'), where operands that are not pending stay the same."""
    first = random_operands(one, seed)
    other = random_operands(one, seed + 1)
    pairs = list(zip(first, other, pending, strict=True))
    second = [q if p else held for held, q, p in pairs]
    total = [held + q if p else held for held, q, p in pairs]
    results = zip(*(evaluate(one, xs) for xs in (first, second, total)), strict=True)
    return all(
        y.is_floating_point() and torch.allclose(y1 + y2, y, equal_nan=True)
        for y1, y2, y in results
    )


def choices(one: Node) -> list[list[bool]]:
    """Every non-empty set of float operands that may be pending sums."""
    each = [
        (False, True) if v.dtype.is_floating_point else (False,) for v in one.operands
    ]
    return [list(p) for p in itertools.product(*each) if any(p)]


@pytest.mark.parametrize("example", ALL + RESHAPES, ids=label)
def test_a_pending_sum_passes_just_the_ops_that_are_linear(example: Example) -> None:
    for one in draws(example):
        for pending in choices(one):
            linear = all(is_linear(one, pending, seed) for seed in (0, 3))
            if passes_pending_sum(one, pending):
                assert linear, (str(one), pending)
            elif op_name(one) not in NOT_PASSED:
                assert not linear, (str(one), pending)
