"""A whole step on paper: what estimates and `inspect` state, event by event."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from models import plain_gpt
from plans import model_file, small_program

from autopar.cli import main
from autopar.machine.hardware import cluster_of
from autopar.passes.mesh import Mesh
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.estimate import Estimate
from autopar.passes.schedule.make_schedule import make_schedule
from autopar.passes.schedule.schedule import Kind
from autopar.passes.schedule.step_run import (
    COMPUTE,
    RankWork,
    StageWork,
    Work,
    run_step,
)
from autopar.passes.search.search import run_on_paper
from autopar.planner.planner import make_prices
from autopar.plans.store import save_plan
from autopar.reports.simulation import simulate_estimate, simulate_program
from autopar.reports.trace_file import trace_data

CLUSTER = cluster_of("4xCPU")
PLAIN = Candidate(Mesh.parse("pp=2,dp=2"), 2, 4, "1f1b", 1, 0, "none", (4, 4))
CANDIDATES = {
    "1f1b": PLAIN,
    "gpipe, ZeRO-1": replace(PLAIN, schedule="gpipe", zero=1),
    "ZeRO-3": replace(PLAIN, zero=3),
    "uneven, halves": replace(PLAIN, schedule="zb-h1", layers=(5, 3)),
    "tensor parallel": replace(PLAIN, mesh=Mesh.parse("pp=2,tp=2"), samples=4),
    "interleaved": replace(
        PLAIN, schedule="interleaved", stages_per_rank=2, layers=(2, 2, 2, 2)
    ),
    "one stage": replace(PLAIN, mesh=Mesh.parse("dp=4"), samples=1, layers=(8,)),
}


@cache
def estimates() -> dict[str, Estimate]:
    case = plain_gpt(layers=8)
    prices = make_prices(case.short(), CLUSTER)
    return {
        name: run_on_paper(candidate, prices, CLUSTER)
        for name, candidate in CANDIDATES.items()
    }


@pytest.mark.matrix(quick=5)
@pytest.mark.parametrize("name", CANDIDATES)
def test_the_step_takes_what_its_estimate_states(name: str) -> None:
    stated = estimates()[name]
    run = simulate_estimate(stated)
    assert run.total == pytest.approx(stated.seconds, rel=1e-9)
    assert run.timeline.bubble == pytest.approx(stated.bubble)
    for busy, idle in zip(run.busy, run.idle, strict=True):
        assert busy + idle == pytest.approx(run.total)
        assert min(busy, idle) > -1e-12
    last = max(event.start + event.work.seconds for event in run.events)
    assert last == pytest.approx(run.total)


@pytest.mark.parametrize("name", CANDIDATES)
def test_memory_is_what_the_estimate_states(name: str) -> None:
    stated = estimates()[name]
    for peak, terms in zip(simulate_estimate(stated).peak, stated.memory, strict=True):
        assert peak == pytest.approx(sum(terms.values()), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "mesh", "microbatches", "stages_per_rank", "zero"),
    [
        ("1f1b", "pp=2,tp=2", 2, 1, 0),
        ("zb-h1", "pp=2,dp=2", 2, 1, 1),
        ("interleaved", "pp=2", 2, 2, 0),
        ("1f1b", "dp=2", 2, 1, 3),
        ("1f1b", "", 1, 1, 0),
    ],
)
def test_memory_is_what_compiling_states(
    schedule, mesh, microbatches, stages_per_rank, zero
) -> None:
    program = small_program(mesh, microbatches, schedule, stages_per_rank, zero=zero)
    run = simulate_program(program, CLUSTER)
    assert list(run.peak) == [terms.total for terms in program.memory]


# --- as a trace ------------------------------------------------------


@pytest.mark.parametrize("name", CANDIDATES)
def test_the_trace_holds_every_action_and_nests(name: str) -> None:
    run = simulate_estimate(estimates()[name])
    events = json.loads(json.dumps(trace_data(run)))["traceEvents"]
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["cat"]].append(event)
    schedule = run.timeline.schedule
    for rank, actions in enumerate(schedule.ranks):
        drawn = [e["name"] for e in rows[rank, COMPUTE] if "microbatch" in e["args"]]
        assert drawn == [schedule.label(a) for a in actions if a.kind.is_compute]
    threads = {(e["pid"], e["tid"]) for e in events if "tid" in e}
    assert len({tid for _, tid in threads}) == len(threads) == 2 * len(run.peak)
    assert {pid for pid, _ in threads}.isdisjoint(tid for _, tid in threads)
    for own in rows.values():
        assert len({event["tid"] for event in own}) == 1
        ends = 0  # in nanoseconds, as Perfetto reads them
        for event in sorted(own, key=lambda e: e["ts"]):
            assert round(event["ts"] * 1e3) >= ends, "events of a stream overlap"
            ends = round(event["ts"] * 1e3) + round(event["dur"] * 1e3)
            assert ends <= run.total * 1e9 + 1
            long = pytest.approx(event["dur"] / 1e6, abs=2e-9)
            assert event["args"]["seconds"] == long


def test_messages_are_arrows_from_what_makes_them_to_what_uses_them() -> None:
    run = simulate_estimate(estimates()["1f1b"])
    events = trace_data(run)["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    sends = [a for actions in run.timeline.schedule.ranks for a in actions]
    assert len(starts) == sum(a.kind.is_send for a in sends) == 8
    assert starts.keys() == ends.keys()
    drawn = [e for e in events if e["ph"] == "X" and e["cat"] == COMPUTE]
    for number, start in starts.items():
        end = ends[number]
        assert end["ts"] > start["ts"] and end["pid"] != start["pid"]
        for arrow in (start, end):
            [inside] = [
                e
                for e in drawn
                if e["pid"] == arrow["pid"]
                and e["ts"] <= arrow["ts"] < e["ts"] + e["dur"]
            ]
            # `0SEND_F3` is made and used by an F3
            assert inside["name"] == start["name"].partition("SEND_")[2]


def test_counters_peak_as_stated_and_end_as_they_began() -> None:
    run = simulate_estimate(estimates()["1f1b"])
    events = trace_data(run)["traceEvents"]
    for rank, peak in enumerate(run.peak):
        amounts = [
            e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == rank
        ]
        assert max(amounts) == round(peak)
        assert amounts[0] == amounts[-1] < peak


# --- on paper alone ------------------------------------------------------


def test_what_is_hidden_costs_only_what_computing_does_not_cover() -> None:
    def total(overlapped: float) -> float:
        gather = Work("all_gather dp", overlapped, overlapped=True)
        stage = StageWork(
            "", {"forward": 2.0, "backward": 1.0, "weight": 1.0}, {"forward": (gather,)}
        )
        return run_step(make_schedule("1f1b", 1, 3), [stage], [RankWork()]).total

    assert total(0.5) == total(2.0) == 3 * 4
    assert total(5.0) == 3 * (5 + 2)


def test_once_a_step_ranks_wait_for_the_slowest() -> None:
    ranks = [
        RankWork(before=(Work("parameters dp", 3.0),)),
        RankWork(before=(Work("parameters dp", 1.0),), after=(Work("optimizer", 2.0),)),
    ]
    stage = StageWork("", {"forward": 1.0, "backward": 1.0, "weight": 1.0})
    run = run_step(make_schedule("1f1b", 2, 1), [stage, stage], ranks)
    assert (run.start, run.total) == (3.0, 3.0 + 6.0 + 2.0)
    assert run.busy == (3.0 + 3.0, 3.0 + 3.0)
    first = next(e for e in run.events if e.action and e.action.kind is Kind.F)
    assert first.start == 3.0


# --- the command ------------------------------------------------------


def test_simulate_prints_and_writes_a_trace(tmp_path: Path, capsys) -> None:
    spec, trace = model_file(tmp_path), tmp_path / "trace.json"
    plan = str(save_plan(small_program(), tmp_path / "plan", spec))
    assert main(["simulate", plan, "--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    assert "rank 1 | ." in text and "peak memory" in text and "4xCPU" in text
    assert json.loads(trace.read_text())["traceEvents"]
    assert main(["simulate", plan, "--devices", "4xA100-80GB", "--json"]) == 0
    fast = json.loads(capsys.readouterr().out)
    assert main(["simulate", plan, "--devices", "4xCPU", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] > fast["seconds"]
    # What was compiled for other devices is simulated on them.
    save_plan(small_program(), plan, spec, cluster=cluster_of("4xA100-80GB"))
    assert main(["simulate", plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == fast
    assert main(["simulate", plan]) == 0
    assert "priced for 4xA100-80GB" in capsys.readouterr().out
    # And it is told to take as long.
    assert main(["inspect", plan, "--json"]) == 0
    inspected = json.loads(capsys.readouterr().out)["schedule"]
    assert inspected["seconds"] == pytest.approx(fast["seconds"])
    assert inspected["bubble"] == pytest.approx(fast["bubble"])
    assert main(["inspect", plan]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "a step on 4xA100-80GB" in text and "by the table of hardware" in text
    few = ["--mesh", "pp=2,tp=2", "--devices", "2xH100", "-o", plan]
    assert main(["compile", spec, *few]) == 2
    assert "the plan is for 4 devices, but 2xH100 has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "no plan directory 'nowhere'"),
        (["PLAN", "--devices", "2xCPU"], "the plan is for 4 devices"),
        (["PLAN", "--devices", "4xQ"], "no device is known as 'Q'"),
        (["PLAN", "--trace", "no/such/folder/x.json"], "cannot write"),
    ],
)
def test_what_cannot_be_simulated(arguments, says, tmp_path: Path, capsys) -> None:
    plan = str(save_plan(small_program(), tmp_path / "plan", model_file(tmp_path)))
    assert main(["simulate", *(plan if a == "PLAN" else a for a in arguments)]) == 2
    assert says in capsys.readouterr().err
