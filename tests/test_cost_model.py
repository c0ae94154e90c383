"""One cost model: the planner, `compile`, `simulate`, `explain` and `inspect` say the
same of a plan, in seconds and in bytes."""

import random
from functools import cache

import pytest
from cases import Case
from models import plain_gpt

from autopar.machine.hardware import cluster_of
from autopar.options import make_plan
from autopar.passes.mesh import Mesh
from autopar.passes.pipeline import compile_program
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.estimate import Estimate
from autopar.passes.program import Program
from autopar.passes.read_program import read_program
from autopar.passes.schedule.make_schedule import SCHEDULES
from autopar.passes.schedule_stages import estimate_program
from autopar.passes.search.balance_layers import balance_ranks
from autopar.passes.search.search import run_on_paper
from autopar.planner.planner import ShortModel, make_prices, plan_of
from autopar.reports.inspection import report_data
from autopar.reports.simulation import simulate_estimate, simulate_program

LAYERS, SAMPLES = 4, 16
MESHES = ("dp=4", "tp=4", "dp=2,tp=2", "cp=2,tp=2", "pp=2,dp=2", "pp=2,tp=2", "pp=4")
# A plan that shares out parameters is priced from layers whose ranks share nothing.
# What compiling then moves out of the loop, adds otherwise, and has alive where two
# blocks meet, the planner does not see: some ops of a layer, so little of a large one.
SECONDS, BYTES = 0.05, 0.05
# What is counted once a step is priced of the short model's samples, not of a rank's.
COUNTED = 1e-4
# Its peaks are of stages put together of pieces, each with what is next to it: near to
# what a stage has.
PIECES = 0.02


@cache
def model(tied: bool) -> Case:
    return plain_gpt(layers=LAYERS, batch=SAMPLES, tied=tied)


@cache
def captured(tied: bool, precision: str) -> ShortModel:
    case = model(tied)
    return case.short(precision=precision)


def draw(seed: int) -> tuple[bool, str, Cluster, Candidate]:
    """Whether weights are tied, a precision, devices, decisions for four of them."""
    chance = random.Random(seed)
    mesh = Mesh.parse(chance.choice(MESHES))
    pp, dp = mesh.axis_size("pp"), mesh.axis_size("dp")
    names = [n for n in sorted(SCHEDULES) if pp > 1 or n == "1f1b"]
    schedule = chance.choice(names)
    per_rank = 2 if schedule in ("interleaved", "looped-bfs", "zb-v") else 1
    if pp * per_rank > LAYERS:
        schedule, per_rank = "1f1b", 1
    layers: tuple[int, ...] | None = (LAYERS,)
    if pp > 1:
        placed = Candidate(mesh, 1, 4, schedule, per_rank, 0, "none", ()).placement
        layers = balance_ranks(LAYERS, placed, 1.0, 0.0, 0.0)
    assert layers is not None
    zero = chance.choice((0, 0, 1, 2, 3)) if dp > 1 else 0
    microbatches = chance.choice((4, 8)) if dp < 4 else 4
    samples = SAMPLES // dp // microbatches
    recompute = chance.choice(("none", "full"))
    decided = (schedule, per_rank, zero, recompute, layers)
    candidate = Candidate(mesh, samples, microbatches, *decided)
    devices = cluster_of(chance.choice(("4xCPU", "4xA100-80GB", "4xH100")))
    return chance.random() < 0.5, chance.choice(("model", "bf16")), devices, candidate


def views(
    tied: bool, precision: str, devices: Cluster, candidate: Candidate
) -> tuple[Estimate, Program]:
    of = captured(tied, precision)
    e = run_on_paper(candidate, make_prices(of, devices), devices)
    plan = plan_of(e.candidate, of)
    program = compile_program(model(tied).trace(plan.lowering), plan, devices)
    return e, program


def same_by_all(
    tied: bool, precision: str, devices: Cluster, candidate: Candidate
) -> None:
    e, program = views(tied, precision, devices, candidate)
    shares = e.candidate.shares > 0
    alone = 1e-6 if candidate.data_parallel == 1 else COUNTED
    seconds, size = (SECONDS, BYTES) if shares else (alone, 1e-6)
    contention = devices.contention(program.mesh)
    compiled = estimate_program(program, devices)
    told = str(e.candidate)
    assert compiled.seconds == pytest.approx(e.seconds, rel=seconds), told
    size = max(size, PIECES)
    for mine, planned in zip(compiled.memory, e.memory, strict=True):
        ratio = sum(planned.values()) / sum(mine.values())
        assert 1 - size <= ratio <= 1 + size, f"{told}: {ratio}"
    for stage, planned in zip(compiled.stages, e.stages, strict=True):
        assert stage.total == pytest.approx(planned.total, rel=1.5 * seconds), told
        if not shares:
            assert stage.exposed_total == pytest.approx(
                planned.exposed_total, rel=1e-6
            ), told
            for kept in ("residuals", "weight_residuals", "sent", "received"):
                found = getattr(stage.footprint, kept)
                assert found == getattr(planned.footprint, kept), told
    for stage, took in zip(program.stages, compiled.stages, strict=True):
        assert stage.account.footprint == took.footprint == stage.footprint, told
    held = sum(stage.account.held.resting for stage in program.stages)
    rests = (m.parameters + m.gradients + m.optimizer for m in program.memory)
    assert held == pytest.approx(sum(rests)), told
    # What is told of one record is that record, to rounding.
    for estimated, run in (
        (e, simulate_estimate(e, contention)),
        (compiled, simulate_program(program, devices)),
    ):
        assert run.total == pytest.approx(estimated.seconds, rel=1e-9), told
        assert sum(estimated.parts.values()) == pytest.approx(estimated.seconds)
        peaks = [sum(terms.values()) for terms in estimated.memory]
        assert list(run.peak) == pytest.approx(peaks, rel=1e-9), told
    assert [m.total for m in program.memory] == pytest.approx(
        [sum(terms.values()) for terms in compiled.memory]
    )
    inspected = report_data(program, devices)
    assert inspected["schedule"]["seconds"] == pytest.approx(compiled.seconds), told
    for row, stage in zip(inspected["stages"], compiled.stages, strict=True):
        assert row["seconds"] == pytest.approx(stage.total, rel=1e-9), told
    read = read_program(program.to_json(), program.plan, program.modules)
    assert read.stages == program.stages, told
    assert estimate_program(read, devices) == compiled, told


# The last has a layer in each stage, and ZeRO-3.
@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("seed", [*range(12), 101])
def test_all_views_of_a_plan_say_the_same(seed: int) -> None:
    same_by_all(*draw(seed))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_all_views_of_shares_that_are_replicated_say_the_same(zero: int) -> None:
    mesh = Mesh.parse("dp=2,fsdp=2")
    candidate = Candidate(mesh, 1, 4, "1f1b", 1, zero, "none", (LAYERS,))
    same_by_all(True, "model", cluster_of("4xA100-80GB"), candidate)


def test_what_is_cast_under_zero_3_is_a_share() -> None:
    """Of a deep model with short sequences, of which casts would be most of a peak."""
    layers = 24
    case = plain_gpt(layers=layers, heads=32, seq=2, batch=SAMPLES)
    devices = cluster_of("4xA100-80GB")
    decided = ("1f1b", 1, 3, "full", (layers,))
    of = case.short(precision="bf16")
    wanted = Candidate(Mesh.parse("dp=4"), 4, 1, *decided)
    e = run_on_paper(wanted, make_prices(of, devices), devices)
    plan = plan_of(e.candidate, of)
    program = compile_program(case.trace(plan.lowering), plan, devices)
    (ratio,) = (
        sum(planned.values()) / sum(mine.values())
        for mine, planned in zip(
            estimate_program(program, devices).memory, e.memory, strict=True
        )
    )
    assert 0.85 < ratio < 1.05


@pytest.mark.parametrize("offload", [False, True])
def test_no_view_has_what_the_optimizer_holds_elsewhere(offload: bool) -> None:
    """Also of a weight that both stages of a rank use, which is there once."""
    how = {"microbatches": 4, "schedule": "zb-v", "stages_per_rank": 2}
    plan = make_plan("pp=2", **how, offload=offload)
    devices = cluster_of("4xA100-80GB")
    program = compile_program(model(True).trace(plan.lowering), plan, devices)
    estimated = estimate_program(program, devices)
    for mine, told in zip(estimated.memory, program.memory, strict=True):
        assert mine["optimizer"] == told.optimizer
        assert told.optimizer == (0 if offload else 2 * told.gradients)
        assert sum(mine.values()) == told.total
    held = sum(told.parameters for told in program.memory)
    assert held == sum(p.nbytes for p in model(True).model.parameters())


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12, 120))
def test_all_views_of_more_plans_say_the_same(seed: int) -> None:
    same_by_all(*draw(seed))
