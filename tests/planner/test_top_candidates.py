"""What is tried for the best plans alone: cuts by rank or by stage, made schedules."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from cases import Case
from models import plain_gpt

from autopar.machine.hardware import cluster_of, with_memory
from autopar.passes.mesh import Mesh
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import Plan, PlanError
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import PLAIN, Cluster
from autopar.passes.price.estimate import Estimate, schedule_of
from autopar.passes.schedule.make_schedule import make_schedule, place_stages
from autopar.passes.schedule.order import read_order, write_order
from autopar.passes.schedule.schedule import ScheduleError
from autopar.passes.search.balance_layers import balance_ranks
from autopar.passes.search.by_formula import rough
from autopar.passes.search.candidates import ALIKE, candidates
from autopar.passes.search.search import run_on_paper
from autopar.planner.planner import (
    ShortModel,
    find_plans,
    make_prices,
    make_space,
    plan_of,
)
from autopar.plans.plan_record import estimate_data
from autopar.reports.simulation import simulate_estimate
from autopar.verify import verify

LAYERS, SAMPLES = 9, 16


@cache
def case() -> Case:
    """Its table is large beside its layers, so that the ends of a pipeline are, too."""
    return plain_gpt(layers=LAYERS, batch=SAMPLES, vocab=1024)


@cache
def of() -> ShortModel:
    return case().short()


@cache
def deep() -> ShortModel:
    made = plain_gpt(layers=16)
    return made.short()


def slow(devices: int) -> Cluster:
    """Devices on which a small model takes its time by what it computes."""
    cluster = cluster_of(f"{devices}xA100-80GB")
    device = replace(cluster.device, launch=0.0, bytes_per_second=1e9)
    device = replace(device, flops={"float32": 1e10})
    return replace(cluster, device=device)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for ends in itertools.combinations(range(1, total), parts - 1):
        pairs = itertools.pairwise((0, *ends, total))
        yield tuple(b - a for a, b in pairs)


# --- cuts ----------------------------------------------------------------------------


def slowest(counts, placement, layer, before, after) -> float:
    ranks = [0.0] * (max(placement) + 1)
    extra = [before, *[0.0] * (len(counts) - 2), after]
    for rank, n, x in zip(placement, counts, extra, strict=True):
        ranks[rank] += n * layer + x
    return max(ranks)


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_ranks_of_several_stages_are_balanced_as_by_brute_force(name: str) -> None:
    draw = random.Random(0)
    for _ in range(60):
        ranks = draw.randint(2, 3)
        placement = place_stages(name, ranks, 2)
        layers = draw.randint(2 * ranks, 9)
        costs = 1.0, 3 * draw.random(), 3 * draw.random()
        found = balance_ranks(layers, placement, *costs)
        assert found is not None and sum(found) == layers and min(found) > 0
        every = compositions(layers, 2 * ranks)
        best = min(slowest(counts, placement, *costs) for counts in every)
        assert slowest(found, placement, *costs) == pytest.approx(best)


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("microbatches", [2, 16])
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_cuts_are_near_the_best_of_all(schedule: str, microbatches: int) -> None:
    """Few microbatches want stages that are alike; many want ranks that are."""
    cluster, mesh = slow(2), Mesh.parse("pp=2")
    prices = make_prices(of(), cluster)
    wishes = {"schedule": (schedule,), "stages_per_rank": (2,), "recompute": ("none",)}
    wishes |= {"microbatches": microbatches}
    found = find_plans(of(), cluster, SAMPLES, mesh, **wishes).best[0]
    every = [
        run_on_paper(replace(found.candidate, layers=layers), prices, cluster).seconds
        for layers in compositions(LAYERS, 4)
    ]
    assert min(every) <= found.seconds <= 1.03 * min(every)
    assert found.seconds < 0.85 * max(every), "else any cut would do"


@pytest.mark.parametrize("per_rank", [2, 4])
@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs"])
def test_a_formula_knows_how_long_few_microbatches_go_round(
    schedule: str, per_rank: int
) -> None:
    """With fewer of them than ranks, each stage waits for the one before."""
    made, cluster = deep(), slow(4)
    prices, space = make_prices(made, cluster), make_space(made, cluster, 64)
    mesh = Mesh.parse("pp=4")
    for microbatches in (1, 2, 3, 4, 8):
        candidate = Candidate(mesh, 1, microbatches, schedule, per_rank, 0, "none", ())
        ranked = rough(candidate, space, prices)
        assert ranked is not None
        seconds, _, complete = ranked
        took = run_on_paper(complete, prices, cluster).seconds
        assert seconds == pytest.approx(took, rel=0.03)


@pytest.mark.parametrize("share", [pytest.param(10.0, marks=pytest.mark.slow), 0.7])
def test_nothing_on_paper_beats_what_is_found(share: float) -> None:
    """Every candidate of a small space, run on paper; with much memory and little."""
    cluster = with_memory(slow(2), share * planned()[0].peak)
    wishes = {"recompute": ("none",), "zero": (0, 1)}
    space = make_space(of(), cluster, SAMPLES, **wishes)
    prices = make_prices(of(), cluster)
    ranked = [r for c in candidates(space) if (r := rough(c, space, prices))]
    every = [run_on_paper(candidate, prices, cluster) for *_, candidate in ranked]
    fitting = [e.seconds for e in every if e.peak <= cluster.device.memory]
    assert len(fitting) > 8 and (share > 1 or len(fitting) < len(every))
    found = find_plans(of(), cluster, SAMPLES, **wishes)
    assert min(e.seconds for e in found.best) <= min(fitting) * (1 + 1e-9)
    assert found.best[0].seconds <= min(fitting) * (1 + ALIKE)


# --- tied weights --------------------------------------------------------------------


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("zb-v", 2), ("interleaved", 2), ("1f1b", 1)]
)
def test_a_tied_table_is_counted_as_the_program_holds_it(
    schedule: str, per_rank: int
) -> None:
    cluster, mesh = cluster_of("2xA100-80GB"), Mesh.parse("pp=2")
    layers = balance_ranks(LAYERS, place_stages(schedule, 2, per_rank), 1.0, 0, 0)
    assert layers is not None
    candidate = Candidate(mesh, 4, 4, schedule, per_rank, 0, "none", layers)
    found = run_on_paper(candidate, make_prices(of(), cluster), cluster)
    program = compile_program(case().trace(None), plan_of(candidate, of()), PLAIN)
    for terms, held in zip(found.memory, program.memory, strict=True):
        for term in ("parameters", "gradients", "optimizer"):
            assert terms[term] == pytest.approx(getattr(held, term)), term
    (tied,) = (name for name, p in program.parameters.items() if len(p.stages) > 1)
    apart = len(program.gradient_ranks(tied, 0)) > 1
    assert apart == (schedule != "zb-v")
    for once in found.once:
        assert ("gradients pp" in once) == apart


# --- made schedules ------------------------------------------------------------------


@cache
def planned() -> tuple[Estimate, ...]:
    cluster = slow(2)
    return find_plans(of(), cluster, SAMPLES, Mesh.parse("pp=2")).best


def made() -> Estimate:
    return next(e for e in planned() if e.candidate.schedule == "auto")


def test_a_made_schedule_beats_all_named_ones_of_its_plan() -> None:
    e, cluster = made(), slow(2)
    space = make_space(of(), cluster, SAMPLES, mesh=Mesh.parse("pp=2"))
    prices = make_prices(of(), cluster)
    for name in ("1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved"):
        v = 2 if name in ("zb-v", "interleaved") else 1
        if v == e.candidate.stages_per_rank:
            alike = replace(e.candidate, schedule=name, order=(), layers=())
            ranked = rough(alike, space, prices)
            assert ranked is not None
            named = run_on_paper(ranked[-1], prices, cluster)
            assert e.seconds < named.seconds
    assert "auto" in str(e.candidate) and e.candidate.order


def test_what_is_made_is_what_is_compiled_and_right() -> None:
    e = made()
    plan = plan_of(e.candidate, of())
    assert Plan.from_json(plan.to_json()) == plan and plan.order
    program = compile_program(case().trace(plan.lowering), plan, PLAIN)
    assert program.schedule == schedule_of(e.candidate)
    assert program.schedule.stage_to_rank == e.candidate.placement
    for terms, held in zip(e.memory, program.memory, strict=True):
        assert sum(terms.values()) == pytest.approx(held.total, rel=0.02)
    verify(program, case().model, case().batch).check()


def test_a_made_schedule_keeps_to_memory() -> None:
    tight = with_memory(slow(2), 0.9 * made().peak)
    found = find_plans(of(), tight, SAMPLES, Mesh.parse("pp=2"))
    assert max(e.peak for e in found.best) <= tight.device.memory


def test_a_made_schedule_runs_on_paper_as_it_was_estimated() -> None:
    e = made()
    assert simulate_estimate(e).total == pytest.approx(e.seconds)
    assert estimate_data(e)["candidate"]["order"] == e.candidate.order


def test_a_schedule_that_is_decided_stays() -> None:
    found = find_plans(of(), slow(2), SAMPLES, Mesh.parse("pp=2"), schedule=("1f1b",))
    assert {e.candidate.schedule for e in found.best} == {"1f1b"}


# --- orders --------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "v"), [("zb-h1", 1), ("zb-v", 2)])
def test_an_order_is_read_as_written(name: str, v: int) -> None:
    schedule = make_schedule(name, 2, 3, v)
    read = read_order(write_order(schedule), 2, 3, v)
    assert write_order(read) == write_order(schedule)
    assert read.stage_to_rank == schedule.stage_to_rank and read.splits_backward


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["0F0 0I0 0W0"], "has 1 lines for 2 pipeline ranks"),
        (["0F0 0B0", "1F0 1I0 1W0"], "'0B0' in the order of rank 0 is not F, I or W"),
        (["0F0 0I0 0W0", "2F0"], "'2F0' in the order of rank 1"),
        (["0F0 0I0 0W0", ""], "runs no stage 1 of 2"),
        (["0F0 0I0", "1F0 1I0 1W0"], "0W0"),
        (["0F0 zero", "1F0"], "'zero' is not an action"),
    ],
)
def test_an_order_that_cannot_run(lines: list[str], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        read_order(lines, 2, 1, 1)


def test_a_named_schedule_has_its_own_order() -> None:
    with pytest.raises(PlanError, match="schedule '1f1b' has its own"):
        Plan(Mesh.parse("pp=2"), order=("0F0", "1F0"))
