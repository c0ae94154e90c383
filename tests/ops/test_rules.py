"""Every sharding rule, proved by running its op on shards.

Safe: shards of each letter that a rule lets split recombine to the whole result. Not
needlessly whole: no other letter could be split. The examples are those that ops are
declared with, run on shards by the sizes that ranks get.
"""

import itertools
from collections.abc import Callable
from math import prod

import pytest
import torch
from declared import SEEDS, Example, declared, draws, splittable
from graphs import bools, ints, node, x
from torch.utils.flop_counter import FlopCounterMode

from autopar.passes.cost import flops
from autopar.passes.dims.probe import holds, random_operands
from autopar.passes.graph import Node, Value
from autopar.passes.ops.evaluate import evaluate
from autopar.passes.ops.linearity import passes_pending_sum
from autopar.passes.ops.notation import Equation
from autopar.passes.ops.op import OPS, Op
from autopar.passes.ops.random import CHANCE
from autopar.passes.ops.rules import equation


def einsum(text: str, *operands: Value) -> Node:
    return node("aten.einsum.default", text, operands)


UNARY = (
    "relu tanh sigmoid exp log sqrt rsqrt neg abs silu gelu erf cos sin square mish "
    "log_sigmoid reciprocal isnan detach clone zero hardtanh softplus log1p leaky_relu"
)
BINARY = (
    "add.Tensor sub.Tensor mul.Tensor div.Tensor eq.Tensor ne.Tensor lt.Tensor "
    "ge.Tensor remainder.Tensor atan2.default maximum.default floor_divide.default"
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


EXAMPLES = [one for op in OPS.values() if op.rule is not None for one in declared(op)]
ALL = EXAMPLES + POINTWISE

# Rules that tests on shards cannot speak about.
PROVED_ELSEWHERE = {
    **dict.fromkeys(CHANCE, "a function of the global position of each element"),
}
# (op, letter) that could be split and is kept whole.
WHOLE_ON_PURPOSE = {
    ("autopar.attention", "v"): "every rank would compute all the scores anew",
}


def label(example: Example) -> str:
    one = example(2, 3, 4, 5)
    return f"{one.op}({', '.join(str(list(v.shape)) for v in one.operands)})"


def rule_of(one: Node) -> Equation:
    rule = equation(one)
    assert rule is not None, f"{one} has no rule"
    return rule


def test_every_rule_has_an_example() -> None:
    shown = {example(2, 3, 4, 5).name for example in ALL}
    losses = {name for name in OPS if name.endswith(("_loss", "_with_logits"))}
    others = {"aten.kl_div", "aten.binary_cross_entropy", *losses}
    ruled = {name for name, op in OPS.items() if op.rule is not None}
    assert ruled - shown - others - PROVED_ELSEWHERE.keys() == set()


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
            expected = ["map"] if (one.name, letter) in WHOLE_ON_PURPOSE else []
            assert possible == expected, (str(one), letter)


# --- Operations -------------------------------------------------------------------


# What torch does not count: a multiply-add for all letters of each of these.
LETTERS = {
    "aten.addbmm": "ik, bij, bjk",
    "aten.addmv": "i, ij, j",
    "aten.addr": "ij, i, j",
    "aten.bilinear": "ni, nj, oij",
    "aten.conv_tbc": "tbi, kio, o",
    "aten.dot": "i, i",
    "aten.linalg_vecdot": "ij, ij",
    "aten.mv": "ij, j",
    "aten.vdot": "i, i",
}
# Products by autocast, without a count of their own.
NOT_COUNTED = {
    "aten.prelu": "is elementwise",
    "aten.scaled_dot_product_attention": "is autopar.attention when it is counted",
    "aten._grouped_mm": "is autopar.expert_linear when it is counted",
}


@pytest.mark.parametrize(
    "op", [op for op in OPS.values() if op.examples], ids=lambda op: op.name
)
def test_ops_take_the_operations_that_torch_counts(op: Op) -> None:
    """torch counts those of matrices, and of several operands pair by pair."""
    counts = []
    for one in itertools.chain.from_iterable(map(draws, declared(op))):
        operands = random_operands(one, 0)
        with FlopCounterMode(display=False) as counter:
            evaluate(one, operands)
        counts.append(counter.get_total_flops())
        if one.name in LETTERS:
            pairs = zip(LETTERS[one.name].split(", "), operands, strict=True)
            letters = {
                c: n for text, x in pairs for c, n in zip(text, x.shape, strict=True)
            }
            counts[-1] = counts[-1] or 2 * prod(letters.values())
        many = one.name == "aten.einsum" and len(operands) > 2
        assert many or counts[-1] in (0, flops(one)), str(one)
    assert any(counts) == (op.flops is not None)


def test_every_product_counts_its_operations() -> None:
    of_torch = [op for op in OPS.values() if op.name.startswith("aten.")]
    low = {op.name for op in of_torch if op.autocast == "low" and not op.flops}
    assert low == NOT_COUNTED.keys()
    assert [op.name for op in of_torch if op.flops and not op.examples] == []


# --- Which ops a pending sum may pass ----------------------------------------------

RESHAPES: list[Example] = [
    lambda a, b, c, d: node("aten.reshape.default", x(a, b), (a * b,)),
]
# Linear ops that no pending sum passes: no model has needed it on the way to its loss.
NOT_PASSED = {
    *("aten.addmm", "aten.baddbmm", "aten.clone", "aten.constant_pad_nd"),
    "aten.copy",
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
            elif one.name not in NOT_PASSED:
                assert not linear, (str(one), pending)
