"""Compiling offline: the dump of passes, and costs that are measured."""

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.measure.stage_costs import measure
from examples.gpt import GPT, Config
from passes.graph import Graph, Node, Value
from passes.mesh import Mesh
from passes.plan import Plan

CONFIG = Config(layers=2, width=32, heads=4, context=16, vocab=64)


def compile_small(mesh: str = "pp=2"):
    ids = torch.zeros(4, 16, dtype=torch.int64)
    batch = {"ids": ids, "labels": ids.clone()}
    return autopar.compile_offline(GPT(CONFIG), batch, Plan(Mesh.parse(mesh)))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "autopar"


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """The ops that are measured."""
    found: list[str] = []

    def count(node: Node, *flows: object) -> object:
        found.append(node.op)
        return measure(node, *flows)

    monkeypatch.setattr("autopar.measure.stage_costs.measure", count)
    return found


def test_each_pass_is_dumped(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AUTOPAR_DUMP", str(tmp_path / "dump"))
    compile_small()
    names = sorted(p.name for p in (tmp_path / "dump").iterdir())
    assert [n.partition("-")[2] for n in names[:6]] == [
        "trace.txt",
        "normalize.txt",
        "name_dims.txt",
        "propagate.txt",
        "insert_collectives.txt",
        "split_stages.txt",
    ]
    own = ["join.txt", "finish.txt"]  # of each of the two stages, and its module
    stages = [n.partition("-")[2] for n in names[6:]]
    assert [stages[:2], stages[3:5], len(stages)] == [own, own, 6]
    assert stages[2].endswith(".py") and stages[5].endswith(".py")
    for name in names[:5]:
        Graph.parse((tmp_path / "dump" / name).read_text())


def test_costs_are_measured_once(own_cache, measured) -> None:
    compile_small()
    assert "aten.linear.default" in measured
    assert "autopar.attention" in measured
    assert len(list(own_cache.glob("profile-*.json"))) == 1
    measured.clear()
    compile_small()
    assert measured == []


def test_where_they_decide_nothing_costs_are_estimated(measured) -> None:
    (stage,) = compile_small("dp=2").stages
    assert len(measured) == 2, "a product, and what moves data"
    assert stage.seconds.total > 0


def test_a_damaged_cache_is_measured_anew(own_cache) -> None:
    compile_small()
    (file,) = own_cache.glob("profile-*.json")
    file.write_text("{ not json")
    compile_small()
    assert "aten.linear" in file.read_text()


def test_halves_of_a_backward_are_measured_apart() -> None:
    """A square product does as much in all three parts; attention has no weights."""
    x, w = Value("x", (256, 256), torch.float32), Value("w", (256, 256), torch.float32)
    linear = Node("aten.linear.default", (x, w), {}, (Value("y", x.shape, x.dtype),))
    found = measure(linear)
    assert found is not None
    assert 0.2 < found.input_half / found.forward < 5
    assert 0.2 < found.weight_half / found.forward < 5
    q = Value("q", (1, 2, 32, 16), torch.float32)
    args = (q, q, q, None, True, 0.25)
    attention = Node("autopar.attention", args, {}, (Value("y", q.shape, q.dtype),))
    found = measure(attention)
    assert found is not None and found.weight_half == 0 < found.input_half


X = Value("x", (4, 4), torch.float32)
N = Value("n", (4, 4), torch.int64)
C = Value("c", (4, 2), torch.complex64)
Y = Value("y", (4, 4), torch.float32)
PAIRS = Value("pairs", (4, 2, 2), torch.float32)
ROW, INDEX = Value("row", (4,), torch.float32), Value("index", (4,), torch.int64)
MEASURED = {
    "of complex numbers": Node("aten.mul.Tensor", (C, C), {}, (C,)),
    "of pairs": Node("aten.view_as_real.default", (C,), {}, (PAIRS,)),
    "real, of integers": Node("aten.div.Tensor", (N, N), {}, (Y,)),
    "integers, of real ones": Node("aten.argmax.default", (X, -1), {}, (INDEX,)),
    "of which one is real": Node("aten.max.dim", (X, -1), {}, (ROW, INDEX)),
    "real, of the same": Node("aten.broadcast_tensors.default", ((X, Y),), {}, (X, Y)),
}
ESTIMATED = {
    "without a derivative": Node("aten.heaviside.default", (X, Y), {}, (Y,)),
    "on numbers that it refuses": Node(
        "aten.binary_cross_entropy.default", (X, X, None, 0), {}, (Y,)
    ),
}


@pytest.mark.parametrize("name", [*MEASURED, *ESTIMATED])
def test_measuring_refuses_no_op(name: str) -> None:
    node = {**MEASURED, **ESTIMATED}[name]
    outs = tuple(replace(v, name=f"out_{v.name}") for v in node.results)
    found = measure(replace(node, outs=outs))
    assert (found is None) == (name in ESTIMATED)
    assert measure(replace(node, outs=outs), ()) is not None or name in ESTIMATED
