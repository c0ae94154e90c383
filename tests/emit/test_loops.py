"""Loops found in lists of nodes, and the statements that nodes are written as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from graphs import nodes_of
from torch import Tensor

from autopar.passes.emit.hand_over import HandOver, Part
from autopar.passes.emit.loop import Loop, Varying
from autopar.passes.emit.loops import find_loops
from autopar.passes.emit.write_function import Function
from autopar.passes.graph import Graph, Node
from autopar.passes.stage.storages import Alive, Storages

LAYER = """
    param %blocks.+{i}.w f32[2,3]
    f32[2,3] %y_{i} = mul.Tensor(%{x}, %blocks.+{i}.w)  # m.py  blocks.+{i}
    f32[2,3] %{out} = add.Tensor(%y_{i}, {scale})  # m.py  blocks.+{i}
"""


def layer(i: int, x: str, out: str, scale: float = 2.0) -> str:
    return LAYER.format(i=i, x=x, out=out, scale=scale)


def test_a_loop_carries_gives_and_varies() -> None:
    layers = (layer(i, f"x_{i}", f"x_{i + 1}", scale=i / 2) for i in range(4))
    nodes = nodes_of("input %x_0 f32[2,3]" + "".join(layers))
    (loop,) = find_loops(nodes)
    assert isinstance(loop, Loop) and loop.count == 4 and loop.index == (0, 1)
    assert loop.unrolled() == nodes
    (carried,), (scanned,) = loop.carried, loop.scanned
    assert carried.first.name == "x_0" and carried.next == loop.body[1].out
    assert [v.name for v in scanned.values] == [f"blocks.+{i}.w" for i in range(4)]
    assert loop.body[1].args[1] == Varying((0.0, 0.5, 1.0, 1.5), (0, 1, 2, 3))


SINES = """
    f32[2,3] %z_{i}_0 = sin(%y_{i})  # m.py  blocks.+{i}
    f32[2,3] %z_{i}_1 = sin(%z_{i}_0)  # m.py  blocks.+{i}
    f32[2,3] %z_{i}_2 = sin(%z_{i}_1)  # m.py  blocks.+{i}
    f32[2,3] %z_{i}_3 = sin(%z_{i}_2)  # m.py  blocks.+{i}
    f32[2,3] %z_{i}_4 = sin(%z_{i}_3)  # m.py  blocks.+{i}
    f32[2,3] %z_{i}_5 = sin(%z_{i}_4)  # m.py  blocks.+{i}
"""
FIRST = f"""
    input %x f32[2,3]
    param %blocks.+0.w f32[2,3]
    f32[2,3] %ready_0 = sigmoid(%blocks.+0.w)  # m.py  blocks.+0
    f32[2,3] %y_0 = mul.Tensor(%x, %ready_0)  # m.py  blocks.+0
    param %blocks.+1.w f32[2,3]
    f32[2,3] %ready_1 = sigmoid(%blocks.+1.w)  # m.py  blocks.+1
    {SINES.format(i=0)}
    f32[2,3] %x_1 = sin(%z_0_5)  # m.py  blocks.+0
    f32[2,3] %left_0 = exp(%x_1)  # m.py  blocks.+0
"""
LATER = f"""
    f32[2,3] %behind_{{i}} = sin(%left_{{before}})  # m.py  blocks.+{{before}}
    f32[2,3] %y_{{i}} = mul.Tensor(%x_{{i}}, %ready_{{i}})  # m.py  blocks.+{{i}}
    param %{{weight}} f32[2,3]
    f32[2,3] %ready_{{next}} = {{make}}(%{{weight}})  # m.py  {{where}}
    {SINES}
    f32[2,3] %x_{{next}} = add.Tensor(%z_{{i}}_5, %behind_{{i}})  # m.py  blocks.+{{i}}
    f32[2,3] %left_{{i}} = exp(%x_{{next}})  # m.py  blocks.+{{i}}
"""


def ahead_of_a_layer(count: int) -> Graph:
    """Each layer makes ready what the next one reads, and adds up behind itself what
    the one before has left; the last one makes ready what comes after all."""
    text = FIRST
    for i in range(1, count):
        after = i + 1 == count
        where = "after" if after else f"blocks.+{i + 1}"
        make = "cos" if after else "sigmoid"
        at = {"i": i, "before": i - 1, "next": i + 1}
        text += LATER.format(**at, weight=f"{where}.w", make=make, where=where)
    last = f"f32[2,3] %out = add.Tensor(%x_{count}, %ready_{count})"
    return Graph.parse(f"{text}\n{last}\nreturn %out")


def written(
    items: list[Node | Loop], graph: Graph, weights: Mapping[str, Tensor]
) -> list[str]:
    """Writes a function of `x` and a table of weights, that returns `out`."""
    tables = {name: f'p["{name}"]' for name in weights}
    part = Part(items, list(graph.outputs))
    alive = Alive(Storages(list(graph.nodes), ["out"]))
    writer = Function({}, tables, HandOver([part], tables), 0, alive)
    head = writer.arrive(graph.inputs, (), ())
    return ["def run(x, p):", *head, *writer.body(items, part.results), "return out"]


def run(lines: list[str], x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    scope: dict[str, Any] = {}
    exec("\n    ".join(lines), {"torch": torch, "aten": torch.ops.aten}, scope)
    return scope["run"](x.clone(), weights)


@pytest.mark.parametrize("count", [4, 7])
def test_a_last_layer_that_is_without_some_is_of_the_loop(count: int) -> None:
    graph = ahead_of_a_layer(count)
    items = find_loops(list(graph.nodes))
    assert [n for item in items for n in flat(item)] == [*graph.nodes]
    (loop,) = (item for item in items if isinstance(item, Loop))
    without = {t for t, row in enumerate(loop.rows) if None in row}
    assert loop.count - 1 in without and len(items) < 16
    weights = {f"blocks.+{i}.w": torch.randn(2, 3) for i in range(count)}
    weights["after.w"] = torch.randn(2, 3)
    lines = written(items, graph, weights)
    x = torch.randn(2, 3)
    found: dict[str, Tensor] = {"x": x, **weights}
    for node in graph.nodes:
        read = [found[v.name] for v in node.operands]
        name = node.op.removeprefix("aten.").partition(".")[0]
        found[node.out.name] = getattr(torch, name)(*read)
    assert torch.equal(run(lines, x, weights), found["out"])
    assert sum("sin" in line for line in lines) < 20


def test_what_reads_further_back_than_the_row_before_is_no_loop() -> None:
    """Rows that read what is made outside of their loop may be one."""
    layers = (layer(i, f"x_{max(0, i - 2)}", f"x_{i + 1}") for i in range(6))
    nodes = nodes_of("input %x_0 f32[2,3]" + "".join(layers))
    found = find_loops(nodes)
    assert [n for item in found for n in flat(item)] == nodes
    assert all(i.count < 4 for i in found if isinstance(i, Loop))


@pytest.mark.parametrize("kept", [(1, 2, 3, 4), (3,), (2, 4)])
def test_what_is_carried_and_kept_by_a_key_is_there_under_it(kept) -> None:
    layers = "".join(layer(i, f"x_{i}", f"x_{i + 1}") for i in range(4))
    end = "f32[2,3] %out = neg(%x_4)\nreturn %out"
    graph = Graph.parse(f"input %x_0 f32[2,3]{layers}\n{end}")
    weights = {f"blocks.+{i}.w": torch.randn(2, 3) for i in range(4)}
    tables = {name: f'p["{name}"]' for name in weights}
    tables |= {f"x_{i}": f'b["x.{i}"]' for i in kept}
    part = Part(find_loops(list(graph.nodes)), list(graph.outputs))
    alive = Alive(Storages(list(graph.nodes), ["out"]))
    writer = Function({}, tables, HandOver([part], tables), 0, alive)
    writer.arrive(graph.inputs, (), ())
    lines = [
        "def run(x_0, p, b):",
        *writer.body(part.items, part.results),
        "return out",
    ]
    scope: dict[str, Any] = {}
    exec("\n    ".join(lines), {"torch": torch, "aten": torch.ops.aten}, scope)
    x, b = torch.randn(2, 3), dict[str, Tensor]()
    out = scope["run"](x, weights, b)
    for i, w in enumerate(weights.values(), 1):
        x = x * w + 2
        assert i not in kept or torch.equal(b.pop(f"x.{i}"), x)
    assert torch.equal(out, -x) and not b


def test_what_is_carried_and_what_is_given_may_have_one_name() -> None:
    """As both come into a stage."""
    names = ["x", "x_1", "x_2", "x_3"]
    text = "".join(f"input %{name} f32[2,3]\n" for name in names)
    text += "input %sum_0 f32[2,3]\nparam %w f32[2,3]"
    for i, name in enumerate(names):
        text += f"""
    f32[2,3] %y_{i} = mul.Tensor(%{name}, %w)  # m.py  blocks.+{i}
    f32[2,3] %sum_{i + 1} = add.Tensor(%y_{i}, %sum_{i})  # m.py  blocks.+{i}
"""
    (loop,) = find_loops(nodes_of(text))
    assert isinstance(loop, Loop) and loop.carried and loop.scanned
    inside = [one.value.name for one in (*loop.carried, *loop.scanned)]
    assert len({*inside}) == len(inside)


def test_a_view_that_a_loop_reads_too_is_a_statement() -> None:
    """Written into the next view alone it would be gone before the loop begins."""
    layers = "".join(layer(i, f"x_{i}", f"x_{i + 1}") for i in range(4))
    graph = Graph.parse(f"""
        input %x f32[2,3]
        f32[2,3] %x_0 = reshape(%x, [2, 3])
        f32[2,3] %twice = reshape(%x_0, [2, 3])
        {layers}
        f32[2,3] %out = sub.Tensor(%x_4, %twice)
        return %out
    """)
    weights = {f"blocks.+{i}.w": torch.randn(2, 3) for i in range(4)}
    x = start = torch.randn(2, 3)
    for w in weights.values():
        x = x * w + 2
    lines = written(find_loops(list(graph.nodes)), graph, weights)
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
        "half = x.reshape([6]).to(torch.bfloat16)",
        "less = torch.neg(half.reshape([3, 2]))",
        "out = less.to(torch.float32)",
    ]


def test_a_list_of_one_tensor_is_a_statement() -> None:
    text = """
    input %x f32[2,4]
    f32[2,4] %y = chunk(%x, 1, 1)
    f32[8] %z = reshape(%y, [8])
    return %z
    """
    lines = statements(Graph.parse(text))
    assert any("[y] = " in line for line in lines)


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
    text = "input %x_0 f32[2,3]\ninput %x_1 f32[2,3]"
    for i in range(count):
        late = f"%sent_{i} = sub.Tensor(%x_{i}, %x_{i + 1})  # m.py  blocks.+{i}"
        text += f"\nf32[2,3] {late}{layer(i, f'x_{i + 1}', f'x_{i + 2}')}"
    nodes = nodes_of(text)
    items = find_loops(nodes)
    assert [n for item in items for n in flat(item)] == nodes
    assert max(i.count for i in items if isinstance(i, Loop)) >= count - 1
