"""What repeats is written once, and computes what it does node by node, to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import Case
from models import gpt2, llama, mixture, plain_gpt
from torch import Tensor, nn

from autopar.passes.graph import Graph, Location, Node, Value
from autopar.passes.program import Program
from autopar.passes.stage.emit import emit
from autopar.passes.stage.hand_over import HandOver, Part
from autopar.passes.stage.loop import Loop, Varying
from autopar.passes.stage.loops import find_loops
from autopar.passes.stage.storages import Alive, Storages
from autopar.passes.stage.write_function import Function
from autopar.proof.ranks import run_all_ranks


def lines(program: Program) -> int:
    """Of the longest text."""
    return max(len(text.splitlines()) for text in program.modules.values())


PLANS = {
    "tp": ("tp=2", {}),
    "halves": ("pp=2", {"schedule": "zb-h1"}),
    "zero 1": ("dp=2", {"zero": 1}),
    "zero 3": ("dp=2", {"zero": 3, "recompute": "full"}),
    "zero 3, tp": ("dp=2,tp=2", {"zero": 3}),
    "bf16": ("dp=2", {"zero": 2, "precision": "bf16"}),
}


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("plan", PLANS)
def test_a_text_is_as_long_for_any_number_of_layers(plan: str) -> None:
    mesh, options = PLANS[plan]
    low, high = (
        plain_gpt(layers=n, dropout=0.1).compile(mesh, 2, **options) for n in (8, 14)
    )
    assert lines(low) >= lines(high) < 400


@pytest.mark.slow
def test_a_rank_of_gpt2_is_a_text_that_a_person_reads() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
    ids = torch.zeros(8, 1024, dtype=torch.int64)
    case = Case(model, {"input_ids": ids, "labels": ids})
    for mesh, zero in [
        ("dp=4", 3),
        ("dp=2,tp=2", 3),
        ("cp=2,dp=2", 3),
        ("cp=2,tp=2", 0),
    ]:
        assert lines(case.compile(mesh, zero=zero)) < 400, mesh
    half = case.compile("dp=2,tp=2", zero=3, precision="bf16")
    assert lines(half) < 480
    for text in half.modules.values():  # casts, made once, are read by all layers
        assert len(re.findall(r"for i in (?:reversed\()?range\(12\)", text)) == 4


class Shadows(nn.Module):
    """Modules that are called as what every emitted module has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.torch = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.b = nn.ModuleList(nn.ModuleDict({"c": mlp(), "k": mlp()}) for _ in "12")
        self.prologue = mlp()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.b:
            x = x + block["c"](x)
            x = x + block["k"](x).tanh()
        return nn.functional.cross_entropy(
            self.torch(self.prologue(x)).flatten(0, 1), ids.flatten()
        )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8), nn.LayerNorm(8))


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_a_function_has_no_name_that_means_something_else(mesh: str) -> None:
    case = Case(Shadows(), {"ids": torch.arange(32).view(4, 8) % 16}, None)
    program = case.double().compile(mesh, 2)
    text = "".join(program.modules.values())
    assert re.search(r"^def c_2\(", text, re.M) and "def torch(" not in text
    case.double().verify(mesh, 2)


LOOP = re.compile(r"^    for i in .*:$", re.MULTILINE)


def both(
    case: Case, mesh: str, monkeypatch: pytest.MonkeyPatch, **options: object
) -> tuple[Program, Program]:
    """As it is, and with a statement a node."""
    program = case.compile(mesh, 2, **options)
    with monkeypatch.context() as patch:
        patch.setattr("autopar.passes.emit_modules.emit", partial(emit, outlined=False))
        return program, case.compile(mesh, 2, **options)


CASES: dict[str, tuple[Callable[[], Case], str, dict[str, object]]] = {
    "some layers again": (
        partial(plain_gpt, layers=6, dropout=0.1),
        "dp=2",
        {"zero": 3, "recompute_layers": {f"blocks.{i}": "full" for i in range(3)}},
    ),
    "halves": (partial(gpt2, layers=5), "pp=2", {"schedule": "zb-h1"}),
    "experts": (partial(mixture, "mixtral", num_hidden_layers=4), "ep=2", {}),
    "once a step": (partial(llama, layers=4), "dp=2", {"zero": 1, "precision": "bf16"}),
    "alternate": (lambda: alternating(8), "tp=2", {"recompute": "full"}),
}


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("name", CASES)
def test_it_computes_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, mesh, options = CASES[name]
    case = build()
    ours, flat = both(case, mesh, monkeypatch, **options)
    repeats = [LOOP.search(next(iter(p.modules.values()))) for p in (ours, flat)]
    assert repeats[0] and not repeats[1]
    loss, grads = run_all_ranks(ours, case.model, case.batch)
    loss_too, grads_too = run_all_ranks(flat, case.model, case.batch)
    assert torch.equal(loss, loss_too) and grads.keys() == grads_too.keys()
    assert all(torch.equal(grads[name], grads_too[name]) for name in grads)


class Layer(nn.Module):
    def __init__(self, scale: float, wide: bool) -> None:
        super().__init__()
        width = 16 if wide else 12
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Layers(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(12, 8), nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def alternating(count: int) -> Case:
    torch.manual_seed(0)
    layers = [Layer(0.5, wide=i % 2 == 0) for i in range(count)]
    return Case(Layers(layers), {"ids": torch.randint(12, (4, 6))})


def test_layers_that_differ_in_a_number_are_one_function() -> None:
    layers = [Layer(0.1 * (i + 1), wide=True) for i in range(8)]
    case = Case(Layers(layers), {"ids": torch.randint(12, (4, 6))})
    program = case.compile("tp=2")
    (text, *_) = program.modules.values()
    assert "for i in range(1, 8):" in text  # the first one is given shares of no rank
    assert "7: 0.8}[i]" in text and text.count("def down(") == 1
    case.verify("tp=2")


def test_layers_in_turn_repeat_in_pairs() -> None:
    (text, *_) = alternating(8).compile("tp=2").modules.values()
    assert "for i in range(1, 7, 2):" in text


class ReadByAll(nn.Module):
    """Each layer reads what is made before the first, as decoders read an encoder."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed, self.memory = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        memory = torch.tanh(self.memory(x))
        for layer in self.layers:
            x = x + layer(memory).sigmoid() * x
        return x.square().mean()


def test_cotangents_of_what_all_layers_read_are_added_as_they_come() -> None:
    few, many = (Case(ReadByAll(n), {"ids": torch.randint(12, (4, 6))}) for n in (5, 9))
    assert lines(few.compile("tp=2")) >= lines(many.compile("tp=2"))
    few.verify("tp=2")


# --- loops --------------------------------------------------------------------------


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
    tables = {name: f'p["{name}"]' for name in weights}
    part = Part(items, [value("out")])
    alive = Alive(Storages(nodes, ["out"]))
    writer = Function({}, tables, HandOver([part], tables), 0, alive)
    head = writer.arrive([value("x")], (), ())
    lines = ["def run(x, p):", *head, *writer.body(items, part.results), "return out"]
    scope: dict[str, Any] = {}
    exec("\n    ".join(lines), {"torch": torch, "aten": torch.ops.aten}, scope)
    x = torch.randn(2, 3)
    found: dict[str, Tensor] = {"x": x, **weights}
    for node in nodes:
        read = [found[v.name] for v in node.operands]
        name = node.op.removeprefix("aten.").partition(".")[0]
        found[node.out.name] = getattr(torch, name)(*read)
    assert torch.equal(scope["run"](x.clone(), weights), found["out"])
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
    start, twice = value("start"), value("twice")
    nodes = [
        Node("aten.reshape.default", (start, [2, 3]), {}, (xs[0],)),
        Node("aten.reshape.default", (xs[0], [2, 3]), {}, (twice,)),
        *(n for i in range(4) for n in layer(i, xs[i], xs[i + 1])),
        Node("aten.sub.Tensor", (xs[4], twice), {}, (value("out"),)),
    ]
    part = Part(find_loops(nodes), [value("out")])
    tables = {f"blocks.+{i}.w": f'p["{i}"]' for i in range(4)}
    alive = Alive(Storages(nodes, ["out"]))
    writer = Function({}, tables, HandOver([part], tables), 0, alive)
    head = writer.arrive([start], (), ())
    body = [*head, *writer.body(part.items, part.results), "return out"]
    scope: dict[str, Any] = {}
    exec("\n    ".join(["def run(start, p):", *body]), {"torch": torch}, scope)
    given = torch.randn(2, 3), {str(i): torch.randn(2, 3) for i in range(4)}
    x = given[0]
    for w in given[1].values():
        x = x * w + 2
    assert torch.equal(scope["run"](given[0].clone(), given[1]), x - given[0])


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
    nodes, (out,) = list(graph.nodes), graph.outputs
    part = Part(nodes, [out])
    alive = Alive(Storages(nodes, ["out"], {v.name: v.bytes for v in graph.inputs}))
    writer = Function({}, {}, HandOver([part], {}), 0, alive)
    writer.arrive(graph.inputs, (), ())
    assert writer.body(nodes, [out]) == [
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
    nodes, (out,) = list(graph.nodes), graph.outputs
    part = Part(nodes, [out])
    alive = Alive(Storages(nodes, ["out"], {v.name: v.bytes for v in graph.inputs}))
    writer = Function({}, {}, HandOver([part], {}), 0, alive)
    writer.arrive(graph.inputs, (), ())
    lines = writer.body(nodes, [out])
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
