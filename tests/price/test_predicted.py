"""What the planner predicts of plans against what a run of them shows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from processes import run_ranks

from autopar.machine.hardware import this_cluster
from autopar.models.load import load_model
from autopar.passes.mesh import Mesh
from autopar.passes.search.search import run_on_paper
from autopar.planner.planner import capture_short
from examples.benchmarks.predicted import Planned, Planner, Row, choosing, summary
from examples.benchmarks.predicted_plans import CHOICES, Choice, spread
from examples.benchmarks.predicted_runs import Job, Measured, prepare

MODEL = "examples.gpt:tiny"
MEASURED = (
    Choice("dp=2"),
    Choice("tp=2"),
    Choice("pp=2", 4, "zb-h1"),
    Choice("dp=2", 2, zero=1),
    Choice("dp=2", 2, zero=3, recompute="full"),
    Choice("pp=2", 4, "interleaved", 2),
)


@cache
def planner(ranks: int) -> Planner:
    loaded = load_model(MODEL)
    assert loaded.batch is not None
    of = capture_short(loaded.model, loaded.batch)
    return Planner(of, this_cluster(ranks), "gpt", of.batch)


def measure_peaks(jobs: list[Job]) -> list[int]:
    """The most bytes of this rank, of each job."""
    return [prepare(job)[1] for job in jobs]


@pytest.mark.slow
def test_predicted_bytes_are_those_of_a_run() -> None:
    """Parameters, gradients, optimizer and all that a step has alive, rank by rank."""
    plans = [planner(2).choice(choice) for choice in MEASURED]
    jobs = [Job(MODEL, 128, planner(2).samples, p.plan) for p in plans]
    found = run_ranks(measure_peaks, 2, jobs)
    for rank, peaks in enumerate(found):
        for plan, peak in zip(plans, peaks, strict=True):
            mesh = plan.estimate.candidate.mesh
            pipeline = mesh.coords(rank).get("pp", 0)
            predicted = sum(plan.estimate.memory[pipeline].values())
            assert predicted == pytest.approx(peak, rel=0.05), (plan.name, rank)


@pytest.mark.slow
def test_ranks_that_share_a_core_are_predicted_to_take_longer() -> None:
    """With as much work on half the cores a step without a pipeline takes twice as
    long; where ranks wait for each other in a pipeline, less than that."""
    choices = {"dp": Choice("dp=4"), "pp": Choice("pp=4", 4)}
    plans = {name: planner(4).choice(choice) for name, choice in choices.items()}

    def seconds(name: str, cores: float) -> float:
        known = planner(4)
        cluster = replace(known.cluster, cores=cores)
        found = run_on_paper(plans[name].estimate.candidate, known.prices, cluster)
        return found.parts["compute"] + found.parts["shared cores"]

    assert seconds("dp", 2) == pytest.approx(2 * seconds("dp", 4))
    assert seconds("pp", 2) < 1.9 * seconds("pp", 4)


def test_plans_differ_in_all_that_is_decided() -> None:
    assert len(CHOICES) >= 10 and len(set(CHOICES)) == len(CHOICES)
    assert {c.ranks for c in CHOICES} == {2, 4}
    assert {c.zero for c in CHOICES} >= {0, 1, 3}
    assert {c.schedule for c in CHOICES} >= {"1f1b", "gpipe", "interleaved", "zb-h1"}
    assert {c.recompute for c in CHOICES} == {"none", "full"}
    for axis in ("dp", "tp", "pp"):
        assert any(Mesh.parse(c.mesh).axis_size(axis) == 2 for c in CHOICES)
    assert spread(CHOICES, 3) == [CHOICES[0], CHOICES[8], CHOICES[-1]]


def row(plan: Planned, measured: list[float], predicted: list[float]) -> Row:
    """As it is measured in rounds; with as many bytes as are predicted."""
    return Row(plan, Measured(measured, [int(plan.estimate.peak)], 0.0), predicted)


def test_a_pick_is_held_against_the_best_measured() -> None:
    plans = [planner(2).choice(choice) for choice in MEASURED[:3]]
    rows = [
        row(replace(plan, pick=i == 1), [seconds] * 3, [seconds] * 3)
        for i, (plan, seconds) in enumerate(zip(plans, (0.2, 0.3, 0.4), strict=True))
    ]
    assert choosing(rows).startswith("the planner's pick is 50.0% slower than")


def test_a_round_is_predicted_by_what_the_machine_was_in_it() -> None:
    """A minute in which all takes twice as long is no error."""
    plan = replace(planner(2).choice(MEASURED[0]), pick=True)
    slow_in_the_middle = row(plan, [1.0, 2.0, 2.2], [0.9, 1.8, 1.8])
    text = summary([slow_in_the_middle])
    assert "1 plans: median error 10.0% in time, 0.0% in memory" in text
    assert "predictions of a plan differ by 16.7% between rounds" in text
