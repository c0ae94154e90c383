"""Loops found in lists of nodes, and the statements that nodes are written as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.passes.graph import Graph, Location, Node, Value
from autopar.passes.stage.hand_over import HandOver, Part
from autopar.passes.stage.loop import Loop, Varying
from autopar.passes.stage.loops import find_loops
from autopar.passes.stage.storages import Alive, Storages
from autopar.passes.stage.write_function import Function


def value(name: str) -> Value:
    return Value(name, (2, 3), torch.float32)


def layer(i: int, x: Value, out: Value, scale: float = 2.0) -> list[Node]:
    w, y = value(f"blocks.+{i}.w"), value(f"y_{i}")
    where = Location(f"blocks.+{i}")
    return [
        Node("aten.mul.Tensor", (x, w), {}, (y,), where),
        Node("aten.add.Tensor", (y, scale), {}, (out,), where),
    ]


def test_a_loop_carries_gives_and_varies() -> None:
    xs = [value(f"x_{i}") for i in range(5)]
    nodes = [n for i in range(4) for n in layer(i, xs[i], xs[i + 1], scale=i / 2)]
    (loop,) = find_loops(nodes)
    assert isinstance(loop, Loop) and loop.count == 4 and loop.index == (0, 1)
    assert loop.unrolled() == nodes
    (carried,), (given,) = loop.carried, loop.given
    assert carried.first == xs[0] and carried.next == loop.body[1].out
    assert [v.name for v in given.values] == [f"blocks.+{i}.w" for i in range(4)]
    assert loop.body[1].args[1] == Varying((0.0, 0.5, 1.0, 1.5))


def ahead_of_a_layer(count: int) -> list[Node]:
    """Each layer makes ready what the next one reads, and adds up behind itself what
    the one before has left; the last one makes ready what comes after all."""
    where = [Location(f"blocks.+{i}") for i in range(count)]
    sigmoid, sin, mul = "aten.sigmoid.default", "aten.sin.default", "aten.mul.Tensor"
    ready, x = value("ready_0"), value("x")
    nodes = [Node(sigmoid, (value("blocks.+0.w"),), {}, (ready,), where[0])]
    left: Value | None = None
    for i in range(count):
        if left is not None:
            behind = value(f"behind_{i}")
            nodes.append(Node(sin, (left,), {}, (behind,), where[i - 1]))
        y = value(f"y_{i}")
        nodes.append(Node(mul, (x, ready), {}, (y,), where[i]))
        last = i + 1 == count
        weight = value("after.w" if last else f"blocks.+{i + 1}.w")
        ready = value(f"ready_{i + 1}")
        at = Location("after") if last else where[i + 1]
        op = "aten.cos.default" if last else sigmoid
        nodes.append(Node(op, (weight,), {}, (ready,), at))
        for k in range(8):
            z = value(f"z_{i}_{k}")
            nodes.append(Node(sin, (y,), {}, (z,), where[i]))
            y = z
        if left is not None:
            total = value(f"total_{i}")
            nodes.append(Node("aten.add.Tensor", (y, behind), {}, (total,), where[i]))
            x = total
        else:
            x = y
        left = value(f"left_{i}")
        nodes.append(Node("aten.exp.default", (x,), {}, (left,), where[i]))
    out = value("out")
    args = x, ready
    nodes.append(Node("aten.add.Tensor", args, {}, (out,)))
    return nodes


def written(
    items: list[Node | Loop], nodes: list[Node], weights: Mapping[str, Tensor]
) -> list[str]:
    """Writes a function of `x` and a table of weights, that returns `out`."""
    tables = {name: f'p["{name}"]' for name in weights}
    part = Part(items, [value("out")])
    alive = Alive(Storages(nodes, ["out"]))
    writer = Function({}, tables, HandOver([part], tables), 0, alive)
    head = writer.arrive([value("x")], (), ())
    return ["def run(x, p):", *head, *writer.body(items, part.results), "return out"]


def run(lines: list[str], x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    scope: dict[str, Any] = {}
    exec("\n    ".join(lines), {"torch": torch, "aten": torch.ops.aten}, scope)
    return scope["run"](x.clone(), weights)


@pytest.mark.parametrize("count", [4, 7])
def test_a_last_layer_that_is_without_some_is_of_the_loop(count: int) -> None:
    nodes = ahead_of_a_layer(count)
    items = find_loops(nodes)
    assert [n for item in items for n in flat(item)] == nodes
    (loop,) = (item for item in items if isinstance(item, Loop))
    without = {t for t, row in enumerate(loop.rows) if None in row}
    assert loop.count - 1 in without and len(items) < 16
    weights = {f"blocks.+{i}.w": torch.randn(2, 3) for i in range(count)}
    weights["after.w"] = torch.randn(2, 3)
    lines = written(items, nodes, weights)
    x = torch.randn(2, 3)
    found: dict[str, Tensor] = {"x": x, **weights}
    for node in nodes:
        read = [found[v.name] for v in node.operands]
        name = node.op.removeprefix("aten.").partition(".")[0]
        found[node.out.name] = getattr(torch, name)(*read)
    assert torch.equal(run(lines, x, weights), found["out"])
    assert sum("sin" in line for line in lines) < 20


def test_what_reads_further_back_than_the_row_before_is_no_loop() -> None:
    """Rows that read what is made outside of their loop may be one."""
    xs = [value(f"x_{i}") for i in range(8)]
    nodes = [n for i in range(6) for n in layer(i, xs[max(0, i - 2)], xs[i + 1])]
    found = find_loops(nodes)
    assert [n for item in found for n in flat(item)] == nodes
    assert all(i.count < 4 for i in found if isinstance(i, Loop))


def test_a_view_that_a_loop_reads_too_is_a_statement() -> None:
    """Written into the next view alone it would be gone before the loop begins."""
    xs = [value(f"x_{i}") for i in range(5)]
    start, twice = value("x"), value("twice")
    nodes = [
        Node("aten.reshape.default", (start, [2, 3]), {}, (xs[0],)),
        Node("aten.reshape.default", (xs[0], [2, 3]), {}, (twice,)),
        *(n for i in range(4) for n in layer(i, xs[i], xs[i + 1])),
        Node("aten.sub.Tensor", (xs[4], twice), {}, (value("out"),)),
    ]
    weights = {f"blocks.+{i}.w": torch.randn(2, 3) for i in range(4)}
    x = start = torch.randn(2, 3)
    for w in weights.values():
        x = x * w + 2
    lines = written(find_loops(nodes), nodes, weights)
    assert torch.equal(run(lines, start, weights), x - start)


def statements(graph: Graph) -> list[str]:
    """Writes the body of a function that is given the graph's inputs."""
    nodes, (out,) = list(graph.nodes), graph.outputs
    given = {v.name: v.bytes for v in graph.inputs}
    alive = Alive(Storages(nodes, [out.name], given))
    writer = Function({}, {}, HandOver([Part(nodes, [out])], {}), 0, alive)
    writer.arrive(graph.inputs, (), ())
    return writer.body(nodes, [out])


def test_what_a_copied_tensor_is_made_of_is_let_go_of_first() -> None:
    graph = Graph.parse("""
        input %part_0 f32[2,3]
        input %part_1 f32[2,3]
        input %part_2 f32[2,3]
        f32[3,2,3] %stacked = stack([%part_0, %part_1, %part_2])
        f32[2,3,3] %turned = permute(%stacked, [1, 0, 2])
        f32[2,9] %out = reshape(%turned, [2, 9])
        return %out
    """)
    assert statements(graph) == [
        "stacked = aten.stack.default([part_0, part_1, part_2])",
        "del part_0, part_1, part_2",
        "out = stacked.permute([1, 0, 2]).reshape([2, 9])",
    ]


def test_casts_and_views_of_one_tensor_are_one_statement() -> None:
    """A cast copies: what was made before it, if anything, is let go of after it."""
    graph = Graph.parse("""
        input %x f32[2,3]
        f32[6] %flat = reshape(%x, [6])
        bf16[6] %half = to.dtype(%flat, torch.bfloat16)
        bf16[3,2] %view = reshape(%half, [3, 2])
        bf16[3,2] %less = neg(%view)
        f32[3,2] %out = to.dtype(%less, torch.float32)
        return %out
    """)
    lines = statements(graph)
    assert [line for line in lines if not line.startswith("del ")] == [
        "view = x.reshape([6]).to(torch.bfloat16).reshape([3, 2])",
        "less = torch.neg(view)",
        "out = less.to(torch.float32)",
    ]


def test_what_is_dead_is_let_go_of_where_the_peak_would_be_higher() -> None:
    graph = Graph.parse("""
        input %x f32[2,6]
        f32[2,6] %a = exp(%x)
        f32[2,3,2] %heads = reshape(%a, [2, 3, 2])
        f32[3,2,2] %turned = transpose.int(%heads, 0, 1)
        f32[2] %small = sum.dim_IntList(%turned, [0, 2])
        f32[2,2] %grown = ger(%small, %small)
        f32[3,2,2] %large = add.Tensor(%turned, %grown)
        f32[2] %sums = sum.dim_IntList(%large, [0, 2])
        f32[2] %roots = sqrt(%sums)
        f32[2] %out = exp(%roots)
        return %out
    """)
    nodes, (out,) = list(graph.nodes), graph.outputs
    entering = {v.name: v.bytes for v in graph.inputs}
    texts = {}
    for at_once in (True, False):
        alive = Alive(Storages(nodes, ["out"], entering), at_once=at_once)
        part = Part(nodes, [out])
        writer = Function({}, {}, HandOver([part], {}), 0, alive, chains=False)
        writer.arrive(graph.inputs, (), ())
        texts[at_once] = writer.body(nodes, [out])
    made = [line for line in texts[True] if not line.startswith("del")]
    dead = ["del x, a, heads", "del small", "del turned, grown", "del large"]
    # A view takes nothing.
    eager = [*made[:3], dead[0], *made[3:5], dead[1], made[5], dead[2], made[6]]
    assert texts[True] == [*eager, dead[3], made[7], "del sums", made[8]]
    # The most is 112 bytes: 96 of turned and large, 16 of grown. Of 48 each, a and x
    # fit beside what is small.
    assert alive.peak == 112
    lazy = [*made[:4], dead[0], made[4], dead[1], made[5], dead[2]]
    assert texts[False] == [*lazy, *made[6:]]


def flat(item: Node | Loop) -> list[Node]:
    return item.unrolled() if isinstance(item, Loop) else [item]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_rows_begin_where_one_reads_the_row_before(count: int) -> None:
    """What is added to a layer's gradient, a layer late, is of the layer before."""
    xs = [value(f"x_{i}") for i in range(count + 2)]
    nodes = []
    for i in range(count):
        late = Location(f"blocks.+{i}")
        own = layer(i, xs[i + 1], xs[i + 2])
        sent = value(f"sent_{i}")
        nodes += [Node("aten.sub.Tensor", (xs[i], xs[i + 1]), {}, (sent,), late), *own]
    items = find_loops(nodes)
    assert [n for item in items for n in flat(item)] == nodes
    assert max(i.count for i in items if isinstance(i, Loop)) >= count - 1
