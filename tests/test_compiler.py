"""Compiling offline: the dump of passes, and costs that are measured."""

import pytest
import torch

import autopar
from autopar.profiler.stage_costs import measure
from examples.gpt import GPT, Config
from passes.graph import Node, Value
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
    assert len(names) == 8  # and the modules of the two stages
    assert all(n.endswith(".py") for n in names[6:])


def test_costs_are_measured_once(own_cache, monkeypatch) -> None:
    measured = []

    def count(node: Node) -> float:
        measured.append(node.op)
        return measure(node)

    monkeypatch.setattr("autopar.profiler.stage_costs.measure", count)
    compile_small()
    assert "aten.linear.default" in measured
    assert "autopar.attention" in measured
    assert len(list(own_cache.glob("profile-*.json"))) == 1
    measured.clear()
    compile_small()
    assert measured == []


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
    assert 0.2 < found.input_half / found.forward < 5
    assert 0.2 < found.weight_half / found.forward < 5
    q = Value("q", (1, 2, 32, 16), torch.float32)
    args = (q, q, q, None, True, 0.25)
    attention = Node("autopar.attention", args, {}, (Value("y", q.shape, q.dtype),))
    assert measure(attention).weight_half == 0 < measure(attention).input_half
