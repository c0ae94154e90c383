"""Collectives of parameters in blocks: where they start, and where they are awaited."""

from __future__ import annotations

import torch

from passes.graph import Builder, Node, Value, Where
from passes.stage.overlap import by_layer, gather_ahead, scatter_behind

F32 = torch.float32


def value(name: str, *shape: int) -> Value:
    return Value(name, shape or (4,), F32)


def op(kind: str, out: str | None, *operands: Value, layer: str = "") -> Node:
    outs = (value(out),) if out else ()
    return Node(kind, operands, {}, outs, Where(layer))


def gather(out: str, x: Value, layer: str, axis: str = "dp") -> Node:
    return Node("comm.all_gather", (x, axis, 0, None), {}, (value(out),), Where(layer))


def scatter(out: str, x: Value, layer: str, axis: str = "dp") -> Node:
    return Node("comm.reduce_scatter", (x, axis, 0), {}, (value(out),), Where(layer))


def add(name: str, x: Value) -> Node:
    return op("autopar.add_", None, value(f"grad.{name}"), x)


def lines(nodes: list[Node]) -> list[str]:
    return [str(n).replace("comm.", "").replace("aten.", "") for n in nodes]


def ahead(nodes: list[Node], *given: str) -> list[str]:
    builder = Builder({v.name for n in nodes for v in (*n.operands, *n.results)})
    return lines(gather_ahead(nodes, given, by_layer, builder))


def behind(nodes: list[Node], *keep: str) -> list[str]:
    builder = Builder({v.name for n in nodes for v in (*n.operands, *n.results)})
    return lines(scatter_behind(nodes, keep, by_layer, builder))


a, b, x, y = value("a"), value("b"), value("x"), value("y")


def test_a_block_comes_while_the_one_before_computes():
    nodes = [
        gather("a1", a, "h.0"),
        op("mul", "y", x, value("a1")),
        gather("b1", b, "h.0"),
        op("mul", "z", y, value("b1")),
        op("view", "c", value("c0")),
        gather("c1", value("c"), "h.1"),
        op("mul", "u", value("z"), value("c1")),
    ]
    assert ahead(nodes, "a", "b", "c0") == [
        "%gathering = start_gather([%a, %b], dp, [0, 0], [None, None])",
        "%a1, %b1 = wait(%gathering)",
        "%c = view(%c0)",
        "%gathering_1 = start_gather([%c], dp, [0], [None])",
        "%y = mul(%x, %a1)",
        "%z = mul(%y, %b1)",
        "%c1 = wait(%gathering_1)",
        "%u = mul(%z, %c1)",
    ]


def test_what_is_gathered_of_activations_stays():
    nodes = [op("mul", "y", x, a), gather("y1", y, "h.0"), op("mul", "z", value("y1"))]
    assert ahead(nodes, "a") == lines(nodes)


def test_a_parameter_split_over_two_axes_is_whole_in_two_messages():
    nodes = [
        gather("a1", a, "h.0", "cp"),
        gather("a2", value("a1"), "h.0"),
        gather("b1", b, "h.0", "cp"),
        gather("b2", value("b1"), "h.0"),
        op("mul", "y", value("a2"), value("b2")),
    ]
    assert ahead(nodes, "a", "b") == [
        "%gathering = start_gather([%a, %b], cp, [0, 0], [None, None])",
        "%a1, %b1 = wait(%gathering)",
        "%gathering_1 = start_gather([%a1, %b1], dp, [0, 0], [None, None])",
        "%a2, %b2 = wait(%gathering_1)",
        "%y = mul(%a2, %b2)",
    ]


def test_gradients_of_a_block_leave_while_the_next_one_computes():
    nodes = [
        op("mul", "d", x, y),
        scatter("da", value("d"), "h.1"),
        add("a", value("da")),
        op("mul", "e", x, y),
        scatter("db0", value("e"), "h.1"),
        op("aten.reshape.default", "db", value("db0")),
        add("b", value("db")),
        op("mul", "f", x, y),
        scatter("dc", value("f"), "h.0"),
        add("c", value("dc")),
    ]
    assert behind(nodes) == [
        "%d = mul(%x, %y)",
        "%e = mul(%x, %y)",
        "%scattering = start_scatter([%d, %e], dp, [0, 0])",
        "%f = mul(%x, %y)",
        "%da, %db0 = wait(%scattering)",
        " = autopar.add_(%grad.a, %da)",
        "%db = reshape(%db0)",
        " = autopar.add_(%grad.b, %db)",
        "%scattering_1 = start_scatter([%f], dp, [0])",
        "%dc = wait(%scattering_1)",
        " = autopar.add_(%grad.c, %dc)",
    ]


def test_gradients_over_two_axes_leave_in_two_messages():
    nodes = [
        scatter("da1", x, "h.0"),
        scatter("da2", value("da1"), "h.0", "cp"),
        add("a", value("da2")),
        scatter("db1", y, "h.0"),
        scatter("db2", value("db1"), "h.0", "cp"),
        add("b", value("db2")),
    ]
    assert behind(nodes) == [
        "%scattering = start_scatter([%x, %y], dp, [0, 0])",
        "%da1, %db1 = wait(%scattering)",
        "%scattering_1 = start_scatter([%da1, %db1], cp, [0, 0])",
        "%da2, %db2 = wait(%scattering_1)",
        " = autopar.add_(%grad.a, %da2)",
        " = autopar.add_(%grad.b, %db2)",
    ]


def test_a_share_that_is_read_otherwise_is_there_at_once():
    view = op("aten.reshape.default", "z", value("da"))
    nodes = [scatter("da", x, "h.0"), view, add("a", value("z"))]
    assert behind(nodes, "z") == lines(nodes)
    assert behind(nodes) != lines(nodes)


def test_what_is_computed_with_is_no_gradient_of_a_parameter():
    """Rows of activations, whose shares may lie in zigzag."""
    nodes = [scatter("da", x, "h.0"), op("mul", "z", value("da")), add("a", value("z"))]
    assert behind(nodes) == lines(nodes)


def test_a_gradient_leaves_before_it_is_written_over():
    nodes = [
        op("mul", "d", x, y),
        scatter("da", value("d"), "h.0"),
        add("a", value("da")),
        op("autopar.add_", None, value("d"), y),
        op("mul", "z", value("d")),
        scatter("db", value("e"), "h.0"),
        add("b", value("db")),
    ]
    found = behind(nodes, "z")
    start = found.index("%scattering = start_scatter([%d], dp, [0])")
    assert start < found.index(" = autopar.add_(%d, %y)")
    assert found.count("%scattering_1 = start_scatter([%e], dp, [0])") == 1


def test_messages_are_of_one_dtype_and_axis():
    half = Value("h", (4,), torch.bfloat16)
    nodes = [gather("a1", a, ""), gather("b1", b, "", "tp")]
    whole = Value("h1", (8,), torch.bfloat16)
    nodes.append(Node("comm.all_gather", (half, "dp", 0, None), {}, (whole,)))
    found = ahead([*nodes, op("mul", "y", value("a1"))], "a", "b", "h")
    assert found[:3] == [
        "%gathering = start_gather([%a], dp, [0], [None])",
        "%gathering_1 = start_gather([%b], tp, [0], [None])",
        "%gathering_2 = start_gather([%h], dp, [0], [None])",
    ]
