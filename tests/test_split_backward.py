"""split_backward: which half of a backward each node belongs to."""

import torch

from passes.graph import Node, Value
from passes.stage.split_backward import find_dependent, split_backward


def value(name: str) -> Value:
    return Value(name, (4, 8), torch.float32)


def node(op: str, out: Value, *args: object) -> Node:
    return Node(op, args, {}, (out,))


def into(target: Value, *args: object, op: str = "autopar.add_") -> Node:
    return Node(op, (target, *args), {}, ())


dy, x, w, dx, dz, a, b = (value(n) for n in ("dy", "x", "w", "dx", "dz", "a", "b"))
grad = value("grad.w")
MATMUL, GELU, VIEW = "aten.matmul.default", "aten.gelu.default", "aten.reshape.default"


def test_a_linear_layer_has_one_product_in_each_half() -> None:
    to_weight = into(grad, dy, x, op="autopar.linear_weight_grad_")
    to_input = node(MATMUL, dx, dy, w)
    assert split_backward([to_weight, to_input], {"dx"}) == ([to_input], [to_weight])


def test_what_both_halves_read_is_made_in_the_input_half() -> None:
    both = node(GELU, a, dy)
    nodes = [both, into(grad, a), node(MATMUL, dx, a, w)]
    assert split_backward(nodes, {"dx"}) == ([both, nodes[2]], [nodes[1]])


def test_what_leads_to_a_weight_alone_is_made_in_the_weight_half() -> None:
    nodes = [node(MATMUL, dx, dy, w), node(GELU, a, x), into(grad, a)]
    assert split_backward(nodes, {"dx"}) == (nodes[:1], nodes[1:])


def test_what_adds_to_a_cotangent_stays_with_it() -> None:
    nodes = [node(MATMUL, dx, dy, w), into(dx, dy), into(grad, dx)]
    assert split_backward(nodes, {"dx"}) == (nodes[:2], nodes[2:])


def test_what_is_written_over_later_is_read_before() -> None:
    """The weight half would read dz after the sum was added to it."""
    make, early = node(GELU, dz, dy), into(grad, dz)
    change, last = into(dz, dy), node(MATMUL, dx, dz, w)
    late = into(grad, dz)
    nodes = [make, early, change, last, late]
    assert split_backward(nodes, {"dx"}) == ([make, early, change, last], [late])


def test_what_is_written_over_through_a_view_is_read_before() -> None:
    make, seen = node(GELU, dz, dy), node(VIEW, a, dz, (8, 4))
    early = into(grad, dz)
    change, last = into(a, dy), node(MATMUL, dx, a, w)
    nodes = [make, seen, early, change, last]
    assert split_backward(nodes, {"dx"}) == (nodes, [])


def test_what_the_weight_half_writes_over_is_its_own() -> None:
    nodes = [node(MATMUL, dx, dy, w), node(GELU, a, dx), into(a, dy), into(grad, a)]
    assert split_backward(nodes, {"dx"}) == (nodes[:1], nodes[1:])


def test_what_depends_on_the_batch() -> None:
    nodes = [node(GELU, a, x), node(MATMUL, b, w, w), node(MATMUL, dx, a, b)]
    assert find_dependent([x], nodes) == {"x", "a", "dx"}
