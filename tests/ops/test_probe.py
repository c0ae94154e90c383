"""Ops without a rule: which of their dims trials find free to split."""

import pytest
import torch
from graphs import ints, node, x
from torch import Tensor

from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.capture.trace import trace
from autopar.passes.dims import probe
from autopar.passes.dims.name_dims import name_dims
from autopar.passes.dims.probe import probe_equation
from autopar.passes.graph import Node
from autopar.passes.ops.notation import Equation
from autopar.passes.ops.rules import equation


def text(rule: Equation | None) -> str:
    """`a b, b -> a b`, with `_` for a dim that is whole."""
    if rule is None:
        return "whole"

    def side(tensors: tuple[tuple[tuple[str, ...], ...], ...]) -> str:
        return ", ".join(" ".join("".join(d) or "_" for d in dims) for dims in tensors)

    return f"{side(rule.operands)} -> {side(rule.outs)}"


FOUND = [
    (node("aten.kthvalue.default", x(3, 4, 5), 2), "a b _ -> a b, a b"),
    (node("aten.take_along_dim.default", x(3, 5), ints(3, 4), 1), "a _, a b -> a b"),
    (node("aten.index.Tensor", x(6, 4), (ints(5),)), "_ b, a -> a b"),
    (node("aten.index.Tensor", x(6, 4), (ints(5, 3),)), "_ c, a b -> a b c"),
    (node("aten.repeat.default", x(3, 4), (1, 2)), "a _ -> a _"),
    (node("aten.native_layer_norm.default", x(2, 3, 4), (4,), x(4), x(4), 1e-5),
     "a b _, _, _ -> a b _, a b _, a b _"),
    (node("aten.glu.default", x(3, 6), 1), "a _ -> a _"),
    (node("aten.diff.default", x(3, 6), 1, 0), "_ a -> _ a"),
    (node("aten.flip.default", x(3, 6), (0,)), "_ a -> _ a"),
    (node("aten.index_put.default", x(3, 4), (x(3, 4, dtype=torch.bool),), x()),
     "a b, a b,  -> a b"),
    (node("aten.index_add.default", x(3, 4), 1, ints(2), x(3, 2)),
     "a _, _, a _ -> a _"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "expected"), FOUND, ids=lambda p: str(p)[:40])
def test_free_dims_are_found(one: Node, expected: str) -> None:
    assert equation(one) is None
    assert text(probe_equation(one)) == expected


@pytest.mark.parametrize(
    "one",
    [
        node("aten.rand_like.default", x(3, 4)),
        node("aten.native_dropout.default", x(3, 4), 0.5, True),
        node("aten.cumsum.default", x(4), 0),
        node("aten.flip.default", x(3, 6), (0, 1)),
        node("aten.expand_copy.default", x(1, 5), (4, 5)),
        Node("aten.mul_.Tensor", (x(3, 4), 2), {}, (x(3, 4),)),
        Node(
            "aten.linalg_lu_solve.default",
            (x(4, 4), x(4, dtype=torch.int32), x(4, 2)),
            {},
            (x(4, 2),),
        ),  # which writes where its pivots point
        Node("aten.linalg_cholesky.default", (x(4, 4),), {}, (x(4, 4),)),
    ],
    ids=lambda one: one.op,
)
def test_what_cannot_be_shown_to_be_free_stays_whole(one: Node) -> None:
    assert probe_equation(one) is None


def test_a_kernel_of_the_users_own() -> None:
    @torch.library.custom_op("autopar_tests::center", mutates_args=())
    def center(x: Tensor, scale: float) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) * scale

    one = node("autopar_tests.center.default", x(3, 4, 5), 2.0)
    assert text(probe_equation(one)) == "a b _ -> a b _"


def test_large_tensors_are_tried_as_small_ones() -> None:
    rows, width, tokens = 50257, 12288, 65536
    table, index, out = x(rows, width), ints(tokens), x(tokens, width)
    one = Node("aten.index.Tensor", (table, (index,)), {}, (out,))
    assert text(probe_equation(one)) == "_ b, a -> a b"


def test_a_size_among_the_arguments_keeps_a_large_op_whole() -> None:
    shape = (4, 2**20)
    one = Node("aten.expand_copy.default", (x(1, 2**20), shape), {}, (x(*shape),))
    assert probe_equation(one) is None


def test_equal_ops_are_tried_out_once() -> None:
    def layer() -> Node:
        return node("aten.cumprod.default", x(3, 7), 1)

    rule = probe_equation(layer())
    before = probe._probe.cache_info().misses
    assert probe_equation(layer()) == rule
    assert probe._probe.cache_info().misses == before


def test_trials_leave_the_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    probe_equation(Node("aten.rand_like.default", (x(2, 11),), {}, (x(2, 11),)))
    assert torch.equal(before, torch.get_rng_state())


class Routed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = torch.nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        best = self.score(x).mode(-1).values
        return best.flip((0, 1)).sum()


def test_what_trials_found_is_told() -> None:
    named = name_dims(normalize(trace(Routed(), {"x": torch.randn(4, 3, 6)})))
    told = list(named.unruled.values())
    assert told == [
        "aten.mode: no rule; found by trial that 'batch', 'd1' may be split",
        "aten.flip: no rule; kept whole",
    ]
