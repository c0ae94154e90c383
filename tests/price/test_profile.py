"""`autopar profile`: what is measured, where it is kept, and who reads it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import Case
from models import plain_gpt, switch_gpt
from plans import model_file
from processes import run_ranks

from autopar.cli import main, parser
from autopar.commands.profile import launches
from autopar.machine.backend import resolve_backend
from autopar.machine.machine import busy, cores, machine_text
from autopar.machine.measured_cluster import measured_cluster, named_cluster
from autopar.machine.profile_file import (
    BackendTimes,
    Profile,
    ProfileError,
    read_profile,
    save_profile,
    usual_path,
)
from autopar.measure import ops as measure_ops
from autopar.measure.compiled import measure_compiled
from autopar.measure.messages import geometries, measure_messages
from autopar.measure.ops import NO_MESH, JobTimes, make_job, run_job
from autopar.options import make_plan
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.cost import signature
from autopar.passes.dims.name_dims import name_dims
from autopar.passes.mesh import Mesh
from autopar.passes.ops.collectives import SPEAKS
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.measured import MEASURED, Messages, Ops, Timed
from autopar.passes.price.price_layers import cut_layers
from autopar.passes.shard.collectives import collective
from autopar.passes.stage.differentiate import differentiate
from autopar.passes.stage.local_stage import LocalStage
from autopar.planner.profile import Layers, Workload
from autopar.planner.profile import measure_ops as measure_ops_of
from autopar.planner.request import plan_request

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CXX", "no-such-compiler")  # or backends are measured, for long
    return tmp_path / "cache" / "autopar"


# --- ops in place ------------------------------------------------------------------


def local_of(case: Case, mesh: str, halves: bool, **options) -> LocalStage:
    plan = make_plan(mesh, microbatches=2, **options)
    named = name_dims(normalize(case.trace()))
    sizes = plan.sizes
    whole = cut_layers(named, plan, ("",)).stages[0]
    at_zero = dict.fromkeys(sizes, 0)
    return differentiate(whole, sizes, at_zero, zero=plan.zero, halves=halves)


def dropping_gpt() -> Case:
    return plain_gpt(dropout=0.1)


def run(case: Case, local: LocalStage, mesh: str) -> JobTimes:
    known = {**case.batch, **case.trace().literals}
    job = make_job("it", local, make_plan(mesh).mesh, 2, known)
    return run_job(job, CPU, repeats=1)


@pytest.mark.matrix(quick=4)
@pytest.mark.parametrize(
    ("build", "mesh", "halves", "options"),
    [
        (dropping_gpt, "tp=2", False, {}),
        (plain_gpt, "tp=1", True, {}),
        (plain_gpt, "cp=2", False, {}),
        (plain_gpt, "cp=2", False, {"context_parallel": "ring"}),
        (plain_gpt, "dp=2", False, {"zero": 3}),
        (switch_gpt, "ep=2", False, {}),
    ],
)
def test_every_statement_has_its_time(build, mesh, halves, options, monkeypatch):
    """The clock ticks once for each reading, so each statement takes a second."""
    monkeypatch.setattr(measure_ops, "clock_of", lambda _: itertools.count().__next__)
    monkeypatch.setattr(measure_ops, "_overhead", lambda _: 0.0)
    case = build()
    local = local_of(case, mesh, halves, **options)
    found = run(case, local, mesh)
    parts = {"forward": local.forward, "backward": local.whole_backward}
    nodes = [n for part in parts.values() for n in part]
    computing = [n for n in nodes if not collective(n) and n.op not in SPEAKS]
    assert set(found.timed) == set(map(signature, computing))
    assert sum(found.parts.values()) == len(nodes)
    # Two readings around the whole: it takes a second too, which all have a share of.
    assert {t.seconds for t in found.timed.values()} == {1 / len(nodes)}
    assert list(found.parts) == (
        ["forward", "backward_input", "backward_weight"]
        if halves
        else ["forward", "backward"]
    )


def test_the_whole_is_told_beside_its_parts() -> None:
    parts = {"forward": 0.5, "backward": 0.4}
    times = JobTimes({"a": Timed(1, 1, 1)}, parts, 0.5, 1.0)
    assert str(times) == "forward and backward 1 s, 90.0% of it in 1 ops"


# --- messages ------------------------------------------------------------------------


def measure_two() -> Messages:
    return measure_messages(2, CPU, 0.0, (256, 4096))


@pytest.mark.slow
def test_messages_between_two_ranks_are_measured() -> None:
    first, second = run_ranks(measure_two, 2)
    assert first == second
    kinds = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}
    assert set(first.points) == {(kind, 2, 1) for kind in kinds}
    for points in first.points.values():
        assert [bytes for bytes, _ in points] == [256, 4096]
        assert all(seconds > 0 for _, seconds in points)
    assert set(first.skew) == {(2, 1)} and first.skew[2, 1] >= 0
    assert first.wakeup == 0.0  # nobody computes beside them


def measure_three() -> float:
    return measure_messages(3, CPU, 0.0, (256,)).wakeup


@pytest.mark.slow
def test_a_message_is_awaited_while_all_others_compute() -> None:
    wakeups = run_ranks(measure_three, 3)
    assert len({*wakeups}) == 1 and 0.0 < wakeups[0] < 1.0


def test_groups_of_all_strides_are_measured() -> None:
    assert geometries(2) == [(2, 1)]
    assert geometries(4) == [(2, 1), (2, 2), (4, 1)]
    assert geometries(6) == [(2, 1), (2, 3), (3, 1), (3, 2), (6, 1)]


# --- the file ------------------------------------------------------------------------

OPS = Ops(
    {"aten.add.Tensor(f32[2])": Timed(1e-6, 24, 2)}, ((64.0, 1e-6), (128.0, 2e-6))
)
MESSAGES = Messages({("send", 2, 1): ((8.0, 1e-4), (16.0, 2e-4))}, {(2, 1): 1e-3}, 2e-3)
PROFILE = Profile(
    {2: OPS},
    {2: MESSAGES},
    {"aten.add": Timed(1.0, 2.0, 0.0)},
    {"cpu": BackendTimes(3.0, 2.0, 1.0)},
)


def test_a_profile_is_read_as_it_was_written(own_cache) -> None:
    assert read_profile() == Profile()
    assert save_profile(PROFILE) == usual_path() == own_cache / "profile-1.json"
    assert read_profile() == PROFILE
    more = Ops({"aten.mul.Tensor(f32[2])": Timed(1e-6, 24, 2, 0.5)})
    save_profile(Profile({2: more}))
    both = Ops({**OPS.timed, **more.timed}, OPS.update)
    assert read_profile() == replace(PROFILE, ops={2: both})
    assert [p.name for p in own_cache.iterdir()] == ["profile-1.json"]
    (key,) = more.timed  # measured again without a compiler, it is known as compiled
    save_profile(Profile({2: Ops({key: Timed(2e-6, 24, 2)})}))
    assert read_profile().ops[2].timed[key] == Timed(2e-6, 24, 2, 0.5)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: "{ not json",
        lambda data: "[]",
        lambda data: data.replace('"messages"', '"massages"'),
        lambda data: data.replace("0.0001", "-0.0001"),
        lambda data: data.replace("16.0", "4.0"),  # sizes ascend
        lambda data: data.replace("1e-06", '"1e-06"'),
    ],
)
def test_a_damaged_cache_is_told_and_measured_again(change, caplog, tmp_path) -> None:
    path = save_profile(PROFILE)
    path.write_text(change(path.read_text()))
    assert read_profile() == Profile()
    assert "is damaged: " in caplog.text
    assert "; what it held is measured again" in caplog.text
    with pytest.raises(ProfileError, match=r"damaged: .*\n  fix  delete it"):
        read_profile(path)
    with pytest.raises(ProfileError, match="damaged"):
        save_profile(PROFILE, path)  # a file of the user's own is not overwritten
    save_profile(PROFILE)
    assert read_profile() == PROFILE


def test_a_profile_of_another_format_is_an_error(tmp_path) -> None:
    path = save_profile(PROFILE, tmp_path / "mine.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 9}))
    with pytest.raises(ProfileError, match="is not of format 1"):
        read_profile(path)
    with pytest.raises(ProfileError, match=r"cannot read '.*none.json'"):
        read_profile(tmp_path / "none.json")


@pytest.mark.parametrize("changed", ["torch", "machine"])
def test_what_was_measured_elsewhere_is_not_taken(
    changed, tmp_path, monkeypatch, caplog
) -> None:
    path = save_profile(PROFILE, tmp_path / "mine.json")
    save_profile(PROFILE)
    before = machine_text()
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    else:
        monkeypatch.setattr("autopar.machine.machine._processor", lambda: "Another CPU")
    with pytest.raises(ProfileError, match=r"nothing that was measured on this") as e:
        named_cluster("2", path)
    assert f"it is   {machine_text()}\n  it has {before}" in str(e.value)
    assert measured_cluster(2).profile == ""
    assert f"(but these were: {before})" in caplog.text
    assert "autopar profile MODEL --ranks 2" in caplog.text


# --- who reads it --------------------------------------------------------------------


def cluster_wanted(mesh: int | str) -> Cluster:
    asked = plan_request(mesh, {})
    assert asked is not None
    return asked.cluster


def test_devices_of_this_machine_are_as_measured(monkeypatch, caplog) -> None:
    monkeypatch.setattr("autopar.machine.measured_cluster.busy", lambda ranks: 2)
    save_profile(PROFILE)
    ops = replace(OPS, compiled=0.5)  # products take 1 of 3, and of 2
    for found in (cluster_wanted(2), cluster_wanted("2")):
        assert found.profile == machine_text()
        assert (found.device.ops, found.messages) == (ops, MESSAGES)
    assert not caplog.records
    four = cluster_wanted(4)
    assert four.device.ops == ops and not four.messages.points
    assert cluster_wanted("2xCPU").profile == ""


def test_a_profile_goes_with_devices_of_this_machine_alone(tmp_path, capsys) -> None:
    path = save_profile(PROFILE, tmp_path / "mine.json")
    with pytest.raises(ProfileError, match="but the devices are 2xA100-80GB"):
        named_cluster("2xA100-80GB", path)
    asked = ["plan", model_file(tmp_path), "--profile", str(path), "--cluster"]
    (tmp_path / "c.json").write_text('{"devices": 2, "device": "A100-80GB"}')
    assert main([*asked, str(tmp_path / "c.json")]) == 2
    assert "not of a cluster file's" in capsys.readouterr().err


def test_as_many_ranks_compute_at_once_as_there_are_cores(monkeypatch) -> None:
    assert busy(1) == 1 and busy(1000) == cores()
    monkeypatch.setenv("OMP_NUM_THREADS", str(10 * cores()))
    assert busy(2) == 1


def test_ops_are_measured_for_each_number_that_computes_at_once(monkeypatch) -> None:
    monkeypatch.setattr("autopar.commands.profile.busy", lambda ranks: min(ranks, 2))
    asked = parser().parse_args(["profile", "m.py:f", "--ranks", "4,1,2"])
    assert launches(asked) == [(1, "m.py:f"), (2, ""), (4, "m.py:f")]


@pytest.mark.slow
def test_profile_then_plan_then_explain(tmp_path, capsys, monkeypatch) -> None:
    """The whole way, on one rank: all that it computes was measured."""
    model, plan = model_file(tmp_path), str(tmp_path / "plan")
    assert main(["profile", "--show"]) == 0
    assert capsys.readouterr().out.startswith("nothing was measured on this machine")
    small = [(256, 1e-3)]
    monkeypatch.setattr("autopar.measure.update.SIZES", [bytes for bytes, _ in small])
    assert main(["profile", model, "--ranks", "1", "--samples", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert "2 samples: forward and backward" in captured.err
    data = json.loads(captured.out)
    assert data["machine"] == machine_text() and set(data["ops"]) == {"1"}
    assert any("linear_weight_grad_" in key for key in data["ops"]["1"]["timed"])
    assert main(["profile", "--show"]) == 0
    assert "ops, 1 at a time" in capsys.readouterr().out
    asked = ["--devices", "1", "--global-batch", "2", "-o", plan]
    assert main(["plan", model, *asked]) == 0
    assert "computing: 100% measured" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", plan, "--reprice", "--json"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert sources["compute"] == {MEASURED: pytest.approx(1)}
    usual_path().unlink()
    assert main(["explain", plan]) == 0  # all that it tells is in the plan
    assert "100% measured" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", plan, "--reprice"]) == 2
    assert "which is not here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (["--ranks", "two"], "--ranks: 'two' is not a whole number from 1 to 1024"),
        ([], "fix  say how many a plan will have: --ranks 2,4"),
        (["--ranks", "0,2"], "--ranks: '0' is not"),
        (["--ranks", "1", "--samples", "0"], "--samples: '0' is not"),
        (["none.py:model", "--ranks", "2"], "none.py"),
    ],
)
def test_what_cannot_be_measured_is_an_error(asked, text, capsys) -> None:
    assert main(["profile", *asked]) == 2
    assert text in capsys.readouterr().err


def test_auto_is_the_backend_that_was_measured_to_be_faster(monkeypatch, capsys):
    compiled, slow = {"cpu": BackendTimes(2.0, 1.0)}, BackendTimes(1.0, 2.0)
    eager = {"cpu": slow, "cuda": BackendTimes(1.0, 1.0)}
    monkeypatch.setattr("autopar.machine.backend.missing_compiler", lambda device: "")
    assert resolve_backend("auto", CPU, eager) == ("eager", "")
    assert resolve_backend("auto", CPU, compiled) == ("inductor", "")
    assert resolve_backend("eager", CPU, compiled) == ("eager", "")
    assert resolve_backend("auto", torch.device("cuda"), compiled) == ("inductor", "")
    assert resolve_backend("auto", torch.device("cuda"), eager) == ("eager", "")
    missing = "the C++ compiler g++"
    monkeypatch.setattr(
        "autopar.machine.backend.missing_compiler", lambda device: missing
    )
    backend, note = resolve_backend("auto", CPU, compiled)
    assert backend == "eager" and missing in note
    save_profile(Profile(backends=compiled))
    assert main(["profile", "--show"]) == 0
    assert "cpu" in capsys.readouterr().out


@pytest.mark.slow
def test_backends_are_measured_by_turns_if_compiling_is_not_too_long(
    tmp_path, monkeypatch
):
    layers = Layers(Workload(model_file(tmp_path), seq=16, samples=2), 1)
    job = layers.job(NO_MESH, 2, outlined=True)
    assert "def blocks(" in job.text
    assert measure_compiled(job, CPU, 3, budget=0.0) is None
    compiled = "autopar.measure.compiled.compile_functions"
    monkeypatch.setattr(compiled, lambda module, text, kept: None)  # both as Python
    eager, inductor = measure_compiled(job, CPU, 3)
    assert 0.2 < eager / inductor < 5


@pytest.mark.slow
def test_what_compiling_gains_is_known_for_each_way_to_split(tmp_path) -> None:
    layers = Layers(Workload(model_file(tmp_path), seq=16, samples=1), 2)
    split = Mesh.parse("tp=2")
    assert layers.meshes == [NO_MESH, split]
    asked = layers, {NO_MESH: 0.25, split: 0.75}, 1, CPU, lambda line: None
    timed = measure_ops_of(*asked)
    gains = {t.compiled for key, t in timed.items() if "linear.default" in key}
    assert gains == {0.25, 0.75}


@pytest.mark.slow
def test_what_does_not_fit_is_not_run(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("autopar.planner.profile.SHARE", 1e-9)
    layers = Layers(Workload(model_file(tmp_path), samples=1), 1)
    assert list(layers.jobs()) == []
    assert "1 samples does not fit here: its ops are not measured" in caplog.text


# --- torchrun ------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_of_torchrun_measure_together(tmp_path, forked_ranks) -> None:
    file = tmp_path / "mine.json"
    asked = ["--ranks", "2", "--seconds", "0.1", "--samples", "1", "-o", str(file)]
    assert main(["profile", model_file(tmp_path), *asked]) == 0
    found = read_profile(file)
    assert set(found.messages) == {2} and set(found.ops) == {busy(2)}
    assert found.ops[busy(2)].timed and found.ops[busy(2)].update
