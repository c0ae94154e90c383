"""Labels for the best plans of a search: they gain on paper, fit, and are right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from models import plain_gpt
from plans import model_file

from autopar.cli import main
from autopar.machine.hardware import cluster_of
from autopar.passes.mesh import Mesh
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import PlanError
from autopar.passes.price.cluster import PLAIN
from autopar.planner.planner import find_plans, plan_of
from autopar.planner.shard_ops_of_best import open_to_op_shardings, shard_ops_of_best
from autopar.verify import verify

SAMPLES = 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "zero", "precision"),
    [
        ("tp=2", 0, "model"),
        ("dp=2,tp=2", 0, "model"),
        ("dp=2,tp=2", 3, "model"),
        ("pp=2,cp=2", 1, "bf16"),
    ],
)
def test_plans_with_op_shardings_are_faster_and_fit_and_are_right(
    mesh: str, zero: int, precision: str
) -> None:
    case = plain_gpt(batch=SAMPLES, tied=False)
    where = Mesh.parse(mesh)
    cluster = cluster_of(f"{where.size}xA100-80GB")
    of = case.short(precision=precision)
    decided = {"recompute": ("none",), "zero": (zero,)}
    plain = find_plans(of, cluster, SAMPLES, where, **decided)
    found, plans = shard_ops_of_best(plain, of, cluster)
    assert plans and {
        e.candidate for e in found.best if e.candidate.has_op_shardings
    } == {*plans}
    templates = {e.candidate: e for e in plain.best}
    for e in found.best:
        if e.candidate.has_op_shardings:
            before = templates[replace(e.candidate, has_op_shardings=False)]
            assert e.seconds < before.seconds and e.peak <= cluster.device.memory
    chosen = next(e for e in found.best if e.candidate.has_op_shardings)
    assert "op shardings" in str(chosen.candidate)
    plan = plans[chosen.candidate]
    assert plan.op_shardings and not plan_of(chosen.candidate, of).op_shardings
    program = compile_program(case.trace(plan.lowering), plan, PLAIN)
    for terms, held in zip(chosen.memory, program.memory, strict=True):
        assert sum(terms.values()) == pytest.approx(held.total, rel=0.04)
    verify(program, case.model, case.batch, seed=3).check()


@pytest.mark.slow
def test_plans_without_an_axis_to_label_stay() -> None:
    case = plain_gpt(batch=SAMPLES)
    of, cluster = case.short(), cluster_of("2xA100-80GB")
    plain = find_plans(of, cluster, SAMPLES, Mesh.parse("dp=2"))
    found, plans = shard_ops_of_best(plain, of, cluster)
    assert found.best == plain.best and not plans


def test_labels_are_tried_where_a_plan_could_become_the_fastest() -> None:
    case = plain_gpt(batch=SAMPLES)
    of, cluster = case.short(), cluster_of("2xA100-80GB")
    fast, slow = (
        find_plans(of, cluster, SAMPLES, Mesh.parse(mesh)) for mesh in ("dp=2", "tp=2")
    )
    found = replace(fast, best=(*fast.best, *slow.best))
    behind = slow.best[0].seconds / min(e.seconds for e in fast.best) - 1
    assert behind > 0.01 and not open_to_op_shardings(found, behind / 2)
    assert open_to_op_shardings(found, 1.01 * behind)[0] == slow.best[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "has_them"), [([], True), (["--no-op-shardings"], False)]
)
def test_labels_are_among_the_plans_unless_they_are_not_wanted(
    given: list[str], has_them: bool, tmp_path: Path, capsys
) -> None:
    asked = ["--devices", "2xA100-80GB", "--mesh", "tp=2", "--microbatches", "1"]
    assert main(["plan", model_file(tmp_path), *asked, *given]) == 0
    assert (", op shardings " in capsys.readouterr().out) == has_them


@pytest.mark.slow
def test_the_command_writes_and_tells_labels(tmp_path: Path, capsys) -> None:
    spec, where = model_file(tmp_path), str(tmp_path / "plan")
    asked = ["--devices", "2xCPU", "--mesh", "tp=2", "--microbatches", "1"]
    assert main(["plan", spec, *asked, "--op-shardings", "-o", where]) == 0
    assert "op shardings: what an axis splits of an op" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["op_shardings"]
    assert main(["explain", where]) == 0
    assert "op shardings: what an axis splits of an op" in capsys.readouterr().out
    assert main(["explain", where, "--reprice"]) == 2
    assert "op shardings were decided for 2xCPU" in capsys.readouterr().err


def test_plans_whose_ops_are_too_entangled_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = plain_gpt(batch=SAMPLES)
    of, cluster = case.short(), cluster_of("2xA100-80GB")
    plain = find_plans(of, cluster, SAMPLES, Mesh.parse("tp=2"))
    monkeypatch.setattr("autopar.passes.search.least_cost.LARGEST", 4)
    found, plans = shard_ops_of_best(plain, of, cluster, reach=1.0)
    assert found.best == plain.best and not plans
    with pytest.raises(PlanError, match="depend on each other") as error:
        shard_ops_of_best(plain, of, cluster)  # as one asks for them
    assert error.value.fix == "leave the op shardings out"
