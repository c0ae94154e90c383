"""reuse: results take over the memory of operands that nobody reads any more."""

import torch

from passes.graph import Node, Value
from passes.stage.reuse import find_owners, reuse

F32 = torch.float32


def value(name: str, *shape: int) -> Value:
    return Value(name, shape or (4, 8), F32)


def node(op: str, out: Value, *args: object, **kwargs: object) -> Node:
    return Node(op, args, kwargs, (out,))


x, y, a, b, c = (value(n) for n in "xyabc")
GELU, ADD, MUL = "aten.gelu.default", "aten.add.Tensor", "aten.mul.Tensor"
VIEW, EXPAND = "aten.reshape.default", "aten.expand.default"


def ops(nodes: list[Node], keep: set[str]) -> list[str]:
    return [n.op.split(".")[1] for n in reuse(nodes, keep)]


def test_a_dead_operand_is_written_over() -> None:
    nodes = [node(GELU, a, x), node(ADD, b, a, y)]
    assert ops(nodes, {"b"}) == ["gelu", "add_"]


def test_the_second_operand_of_a_sum_serves_as_well() -> None:
    nodes = [node(GELU, a, x), node(ADD, b, y, a)]
    found = reuse(nodes, {"b"})
    assert found[1].op == "aten.add_.Tensor"
    assert found[1].args == (a, y)


def test_a_difference_is_not_turned_round() -> None:
    nodes = [node(GELU, a, x), node("aten.sub.Tensor", b, y, a)]
    assert ops(nodes, {"b"}) == ["gelu", "sub"]


def test_what_comes_from_outside_is_left_alone() -> None:
    assert ops([node(ADD, a, x, y)], {"a"}) == ["add"]


def test_what_is_read_later_is_left_alone() -> None:
    nodes = [node(GELU, a, x), node(ADD, b, a, y), node(MUL, c, a, b)]
    assert ops(nodes, {"c"}) == ["gelu", "add", "mul_"]


def test_what_is_kept_is_left_alone() -> None:
    nodes = [node(GELU, a, x), node(ADD, b, a, y)]
    assert ops(nodes, {"a", "b"}) == ["gelu", "add"]


def test_a_view_that_is_read_later_protects_what_it_shows() -> None:
    seen = value("seen", 32)
    nodes = [node(GELU, a, x), node(VIEW, seen, a, (32,)), node(ADD, b, a, y)]
    assert ops(nodes, {"b", "seen"}) == ["gelu", "reshape", "add"]
    assert ops(nodes, {"b"}) == ["gelu", "reshape", "add_"]


def test_a_result_written_over_an_operand_is_protected_in_turn() -> None:
    seen = value("seen", 32)
    nodes = [
        node(GELU, a, x),
        node(ADD, b, a, y),  # over a
        node(VIEW, seen, b, (32,)),
        node(MUL, c, b, y),  # b is seen later
    ]
    assert ops(nodes, {"c", "seen"}) == ["gelu", "add_", "reshape", "mul"]


def test_a_broadcast_view_is_never_written_to() -> None:
    row, wide = value("row", 1, 8), value("wide")
    nodes = [node(GELU, row, x), node(EXPAND, wide, row, (4, 8)), node(ADD, b, wide, y)]
    assert ops(nodes, {"b"}) == ["gelu", "expand", "add"]


def test_an_operand_that_broadcasts_is_too_small() -> None:
    row = value("row", 1, 8)
    assert ops([node(GELU, row, x), node(ADD, b, row, y)], {"b"}) == ["gelu", "add"]


def test_a_value_added_to_itself_is_left_alone() -> None:
    assert ops([node(GELU, a, x), node(ADD, b, a, a)], {"b"}) == ["gelu", "add"]


def test_an_all_reduce_of_a_dead_value_is_in_place() -> None:
    nodes = [node(GELU, a, x), node("comm.all_reduce", b, a, ("tp",), "sum")]
    assert reuse(nodes, {"b"})[1].kwargs == {"inplace": True}
    assert reuse(nodes, {"a", "b"})[1].kwargs == {}


def test_views_belong_to_what_they_show() -> None:
    seen, piece = value("seen", 32), value("piece", 8)
    nodes = [
        node(GELU, a, x),
        node(VIEW, seen, a, (32,)),
        node("aten.slice.Tensor", piece, seen, 0, 0, 8),
    ]
    assert find_owners(nodes) == {"a": "a", "seen": "a", "piece": "a"}
    assert find_owners(nodes[1:], {"a": "a"}) == {"a": "a", "seen": "a", "piece": "a"}
    assert find_owners(nodes[1:]) == {}


def test_keys_repeated_for_the_heads_of_a_group_have_memory_of_their_own() -> None:
    k = value("k", 2, 3, 1, 8)
    repeated, merged = value("repeated", 2, 3, 4, 8), value("merged", 2, 12, 8)
    nodes = [
        node(GELU, k, value("x", 2, 3, 1, 8)),
        node(EXPAND, repeated, k, repeated.shape),
        node(VIEW, merged, repeated, merged.shape),
    ]
    assert find_owners(nodes)["repeated"] == "k"
    assert find_owners(nodes)["merged"] == "merged"


def test_what_is_expanded_as_a_whole_is_reshaped_without_a_copy() -> None:
    total = value("total", 1)
    flat, rows = value("flat", 6), value("rows", 2, 3)
    nodes = [
        node(GELU, total, value("x", 1)),
        node(EXPAND, flat, total, flat.shape),
        node(VIEW, rows, flat, rows.shape),
    ]
    assert find_owners(nodes)["rows"] == "total"
