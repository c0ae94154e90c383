"""Compiling offline: the dump of passes, and costs that are measured."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from graphs import nodes_of

import autopar
from autopar.machine.hardware import cluster_of
from autopar.measure.stage_costs import alone_stage, measure
from autopar.passes.graph import Graph, Node
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.passes.price.measured import Ops, Timed
from autopar.passes.price.price import compute
from autopar.passes.stage.local_stage import LocalStage
from autopar.planner.planner import capture_short, find_plans
from examples.gpt import GPT, Config

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

    def count(name: str, local: LocalStage) -> Mapping[str, Timed]:
        found.append(name)
        return measure(name, local)

    monkeypatch.setattr("autopar.measure.stage_costs.measure", count)
    return found


@pytest.mark.slow
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
    *stages, last = [n.partition("-")[2] for n in names[6:]]
    assert [stages[:2], stages[3:5], len(stages)] == [own, own, 6]
    assert stages[2].endswith(".py") and stages[5].endswith(".py")
    assert last == "schedule_stages.txt"
    for name in names[:5]:
        Graph.parse((tmp_path / "dump" / name).read_text())


@pytest.mark.slow
def test_costs_are_measured_once(own_cache, measured) -> None:
    compile_small()
    assert "aten.linear.default" in measured
    assert "autopar.attention" in measured
    assert len(list(own_cache.glob("profile-*.json"))) == 1
    measured.clear()
    compile_small()
    assert measured == []


def test_measuring_ends_when_its_seconds_are_spent(measured, monkeypatch) -> None:
    monkeypatch.setattr("autopar.measure.stage_costs.OF_ALL", 0.0)
    program = compile_small()
    assert len(measured) <= 1
    assert all(0 < stage.took.total < math.inf for stage in program.stages)


def test_where_they_decide_nothing_costs_are_estimated(measured) -> None:
    (stage,) = compile_small("dp=2").stages
    assert not measured
    assert stage.took.total > 0


@pytest.mark.slow
def test_a_damaged_cache_is_measured_anew(own_cache) -> None:
    compile_small()
    (file,) = own_cache.glob("profile-*.json")
    file.write_text("{ not json")
    compile_small()
    assert "aten.linear" in file.read_text()


def test_halves_of_a_backward_are_measured_apart() -> None:
    """A square product does as much in all three parts; attention has no weights."""
    linear, attention = nodes_of("""
        input %x f32[256,256]
        input %w f32[256,256]
        input %q f32[1,2,32,16]
        f32[256,256] %y = linear(%x, %w)
        f32[1,2,32,16] %z = autopar.attention(%q, %q, %q, None, True, 0.25)
    """)
    forward, backward, weight = measured_parts(linear)
    assert 0.2 < backward / forward < 5
    assert 0.2 < weight / forward < 5
    forward, backward, weight = measured_parts(attention)
    assert weight == 0 < backward


def measured_parts(node: Node) -> tuple[float, ...]:
    """Seconds of an op by itself, forward and both halves of its backward."""
    local = alone_stage(node)
    assert local is not None
    device = replace(PLAIN.device, ops=Ops(measure(node.op, local)))
    found = compute(local, device)
    return tuple(part.seconds for part in found.microbatch.values())


SOURCES = """
    input %x f32[4,4]
    input %n i64[4,4]
    input %c complex64[4,2]
"""
MEASURED = {
    "of complex numbers": "complex64[4,2] %out = mul.Tensor(%c, %c)",
    "of pairs": "f32[4,2,2] %out = view_as_real(%c)",
    "real, of integers": "f32[4,4] %out = div.Tensor(%n, %n)",
    "integers, of real ones": "i64[4] %out = argmax(%x, -1)",
    "of which one is real": "f32[4], i64[4] %out, %at = max.dim(%x, -1)",
    "real, of the same": "f32[4,4], f32[4,4] %a, %b = broadcast_tensors([%x, %x])",
}
ESTIMATED = {
    "without a derivative": "f32[4,4] %out = heaviside(%x, %x)",
    "on numbers that it refuses": "f32[4,4] %y = binary_cross_entropy(%x, %x, None, 0)",
}


@pytest.mark.parametrize("name", [*MEASURED, *ESTIMATED])
def test_measuring_refuses_no_op(name: str) -> None:
    (node,) = nodes_of(SOURCES + {**MEASURED, **ESTIMATED}[name])

    def found(*flows: tuple[str, ...]) -> bool:
        local = alone_stage(node, *flows)
        return local is not None and bool(measure(node.op, local))

    assert found() == (name in MEASURED)
    assert found(()) or name in ESTIMATED


@pytest.mark.slow
def test_other_devices_are_priced_as_the_planner_does(measured) -> None:
    """A stage takes what it does in the estimate of its plan."""
    cluster = cluster_of("1xA100-80GB")
    ids = torch.zeros(4, 1024, dtype=torch.int64)
    with torch.device("meta"):
        model = GPT(Config(layers=2, width=2048, heads=16, context=1024, vocab=4096))
    batch = {"ids": ids, "labels": ids.clone()}
    one = Plan(Mesh.parse("tp=1"), microbatches=2)
    program = autopar.compile_offline(model, batch, one, cluster=cluster)
    of, decided = (
        capture_short(model, batch),
        {"recompute": ("none",), "microbatches": 2},
    )
    (best, *_) = find_plans(of, cluster, 4, **decided).best
    (stage,) = best.stages
    assert program.stages[0].took.total == pytest.approx(stage.total)
    assert not measured
