"""Schedules made for uneven stages: they run, they fit, they beat the named ones."""

from __future__ import annotations

import math
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median

import pytest
import torch
from cases import run_all_ranks
from models import plain_gpt
from processes import run_ranks

import autopar
from autopar.passes.cost import Seconds
from autopar.passes.read_program import read_program
from autopar.passes.schedule.check_schedule import check
from autopar.passes.schedule.fit_schedule import (
    Fitted,
    fit_schedule,
    fits,
    in_halves,
    named_schedules,
)
from autopar.passes.schedule.footprint import Footprint, peak_bytes
from autopar.passes.schedule.list_schedule import RULES, Pipeline, list_schedule
from autopar.passes.schedule.make_schedule import make_schedule
from autopar.passes.schedule.schedule import Kind, ScheduleError, add_communication
from autopar.passes.schedule.simulate_schedule import simulate
from autopar.runtime.parameters.shards import take_shard


def kept(size: int) -> Footprint:
    """A microbatch in flight is `size` bytes, whatever runs."""
    return Footprint(size, size, size, size, 0, size)


@dataclass(frozen=True)
class Draw:
    """An uneven pipeline, and bytes for activations on each rank."""

    microbatches: int
    ranks: int
    stages_per_rank: int
    seconds: tuple[Seconds, ...]
    footprints: tuple[Footprint, ...]
    limit: float
    send: float

    def limits(self, placement):
        return [self.limit] * self.ranks

    def fit(self) -> Fitted:
        return fit_schedule(
            self.microbatches,
            self.ranks,
            self.stages_per_rank,
            self.seconds,
            self.footprints,
            self.limits,
            self.send,
        )

    def total(self, schedule) -> float:
        return simulate(schedule, self.seconds, self.send).total


def draw(seed: int) -> Draw:
    """Stages uneven by up to a factor of a few, memory from 1F1B's to twice as much."""
    dice = random.Random(seed)
    ranks, v = dice.randint(2, 8), dice.choice([1, 1, 2, 3])
    spread = dice.choice([0.1, 0.3, 1.0])

    def around(middle: float) -> float:
        return middle * math.exp(dice.gauss(0, spread))

    stages = range(ranks * v)
    seconds = tuple(Seconds(around(1), around(1), around(1)) for _ in stages)
    sizes = [dice.randint(5, 20) if dice.random() < 0.5 else 10 for _ in stages]
    held = max(sum(sizes[rank::ranks]) for rank in range(ranks))
    limit = dice.choice([1.0, 1.5, 2.0, math.inf]) * ranks * held
    microbatches, send = dice.randint(1, 3 * ranks), dice.choice([0.0, 0.05, 0.3])
    footprints = tuple(map(kept, sizes))
    return Draw(microbatches, ranks, v, seconds, footprints, limit, send)


def verified(case: Draw) -> float | None:
    """How much faster than the best named schedule that fits; None if there is none."""
    fitted = case.fit()
    check(fitted.schedule)
    assert fits(fitted.schedule, case.footprints, [case.limit] * case.ranks)
    # What it says is what a run of it on paper takes, or a little more.
    again = case.total(fitted.schedule)
    assert again <= fitted.seconds * (1 + 1e-9)
    named = [
        case.total(schedule)
        for schedule in named_schedules(
            case.ranks, case.microbatches, case.stages_per_rank
        )
        if fits(add_communication(schedule), case.footprints, [case.limit] * case.ranks)
    ]
    assert all(again <= best * (1 + 1e-9) for best in named)
    return min(named) / again - 1 if named else None


@pytest.mark.parametrize("seed", range(12))
def test_never_slower_than_a_named_schedule_that_fits(seed):
    verified(draw(seed))


def gains_of(seeds: range) -> list[float]:
    """By how much the made schedule beats the best named one, where one fits that is
    no match only because it is naive. Checked: it fits, and is never slower."""
    gains = []
    for seed in seeds:
        case = draw(seed)
        fitted = case.fit()
        assert case.total(fitted.schedule) <= fitted.seconds * (1 + 1e-9)
        assert fits(fitted.schedule, case.footprints, [case.limit] * case.ranks)
        if fitted.named is None or fitted.named_seconds is None:
            continue
        assert fitted.seconds <= fitted.named_seconds * (1 + 1e-12)
        if fitted.named.name != "naive":  # it would be no match
            gains.append(fitted.named_seconds / fitted.seconds - 1)
    return gains


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(100, marks=pytest.mark.slow),
        pytest.param(1000, marks=pytest.mark.nightly),
    ],
)
def test_on_uneven_pipelines(count, capsys):
    """Not only never slower: faster on most, by 1 % or more. On two processes."""
    parts = [range(start, start + 50) for start in range(100, 100 + count, 50)]
    with ProcessPoolExecutor(2, get_context("forkserver")) as pool:
        gains = [gain for part in pool.map(gains_of, parts) for gain in part]
    better = sum(gain > 1e-9 for gain in gains) / len(gains)
    with capsys.disabled():
        print(
            f"\nmade against the best named schedule: {len(gains)} draws, faster on "
            f"{better:.0%}, median {median(gains):.1%}, one in ten by "
            f"{sorted(gains)[int(0.9 * len(gains))]:.1%}; none but naive fits "
            f"on {count - len(gains)}"
        )
    assert better > 0.5
    assert median(gains) > 0.01


def equal(ranks: int, limit: float, microbatches: int = 12) -> Draw:
    one = (Seconds(1.0, 1.0, 1.0),) * ranks
    return Draw(microbatches, ranks, 1, one, (kept(1),) * ranks, limit, 0.0)


def test_with_the_memory_of_1f1b_equal_stages_get_zb_h1():
    fitted = equal(4, 4).fit()
    assert fitted.seconds == equal(4, 4).total(make_schedule("zb-h1", 4, 12))


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_less_memory_than_a_pipeline_by_name_needs(limit):
    case = equal(4, limit)
    fitted = case.fit()
    assert fitted.named is not None and fitted.named.name == "naive"
    assert fitted.named_seconds == equal(4, 1).fit().seconds
    assert (fitted.seconds < fitted.named_seconds) == (limit > 1)
    peaks = [peak_bytes(fitted.schedule, r, case.footprints) for r in range(4)]
    assert max(peaks) <= limit
    check(fitted.schedule)


def test_more_memory_is_never_slower():
    found = [equal(4, limit).fit().seconds for limit in range(1, 9)]
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


def test_without_room_for_one_microbatch():
    with pytest.raises(ScheduleError, match=r"needs 1 bytes .* 0\.5|no schedule fits"):
        equal(4, 0.5).fit()


def test_backwards_in_halves_take_no_longer():
    for name in ("gpipe", "1f1b"):
        whole = make_schedule(name, 4, 6)
        halves = in_halves(whole)
        assert not any(a.kind is Kind.B for actions in halves.ranks for a in actions)
        stages = [Seconds(f, b / 2, b / 2) for f, b in ((1, 2), (3, 5), (2, 4), (1, 2))]
        assert simulate(halves, stages).total <= simulate(whole, stages).total


# --- compiled and run ----------------------------------------------------------------


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
@pytest.mark.parametrize(
    ("mesh", "microbatches"), [("pp=2,tp=2", 4), ("pp=2,dp=2", 2), ("pp=3", 8)]
)
def test_a_made_schedule_computes_the_same(mesh, microbatches, stages_per_rank):
    case = plain_gpt(layers=10, batch=16).double()
    options = {"schedule": "auto", "stages_per_rank": stages_per_rank}
    case.verify(mesh, microbatches, **options)


def test_all_ranks_read_the_list_that_was_made():
    program = plain_gpt().compile("pp=2", 4, schedule="auto")
    stored = read_program(program.to_json(), program.plan, program.modules)
    assert stored.schedule == program.schedule
    assert stored.memory == program.memory and stored.stages == program.stages
    assert stored.plan.schedule == "auto"


def test_memory_bounds_what_is_in_flight():
    case = plain_gpt()
    usual = case.compile("pp=2", 8, schedule="auto")
    most = max(rank.total for rank in usual.memory)
    tight = case.compile("pp=2", 8, schedule="auto", memory=most - 1)
    assert max(rank.total for rank in tight.memory) < most
    loss, grads = run_all_ranks(usual, case.model, case.batch)
    loss_too, grads_too = run_all_ranks(tight, case.model, case.batch)
    assert torch.equal(loss, loss_too)
    assert all(torch.equal(grads[name], grads_too[name]) for name in grads)


def rank_differs_by() -> tuple[float, str]:
    """A step of four processes against the model: the worst error, and the schedule."""
    case = plain_gpt().double()
    step = autopar.compile(
        case.model,
        "pp=2,tp=2",
        schedule="auto",
        stages_per_rank=2,
        microbatches=4,
        example_inputs=case.batch,
    )
    loss = step(**case.batch)
    _, exact = case.model(**case.batch)
    exact.backward()
    errors = [float((loss - exact).detach().abs())]
    wholes = dict(case.model.named_parameters())
    for name, p in step.named_parameters():
        spec, whole = step.program.parameters[name], wholes[name].grad
        part = take_shard(whole, spec, step.program.mesh, step.comm.coords)
        apart = (p.grad.as_subclass(torch.Tensor) - part).abs().max()
        errors.append(float(apart / whole.abs().max()))
    return max(errors), str(step.program.schedule)


@pytest.mark.slow
def test_on_four_processes():
    results = run_ranks(rank_differs_by, 4)
    assert max(error for error, _ in results) < 1e-12
    assert len({schedule for _, schedule in results}) == 1


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("overlap", [False, True])
def test_an_order_ends_where_it_is_slower_than_the_best(overlap: bool) -> None:
    """And only there: what is as fast comes out as without that end."""
    ended = 0
    for seed in range(40):
        case = draw(seed)
        placement = tuple(range(case.ranks)) * case.stages_per_rank
        limits = case.limits(placement)
        job = Pipeline(
            case.microbatches,
            placement,
            case.seconds,
            case.footprints,
            limits,
            case.send,
            overlap,
        )
        for rule in RULES:
            if (whole := list_schedule(job, rule)) is None:
                continue
            assert list_schedule(job, rule, whole.seconds) == whole
            assert list_schedule(job, rule, whole.seconds * (1 - 1e-6)) is None
            ended += 1
    assert ended > 100
