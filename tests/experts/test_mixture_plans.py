"""The planner on mixtures of experts: what plans take, and which are found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from cases import Case
from models import mixture, switch_gpt

from autopar.machine.hardware import cluster_of, with_memory
from autopar.passes.mesh import Mesh
from autopar.passes.pipeline import compile_program
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import PLAIN
from autopar.passes.price.estimate import Estimate
from autopar.passes.schedule_stages import estimate_program
from autopar.passes.search.search import accounts_of, run_on_paper
from autopar.planner.planner import (
    ShortModel,
    find_plans,
    make_prices,
    plan_of,
)

LAYERS, SAMPLES = 4, 16


@cache
def case(name: str) -> Case:
    if name == "switch":
        return switch_gpt(layers=LAYERS, batch=SAMPLES)
    return mixture(name, {"batch": SAMPLES}, num_hidden_layers=LAYERS)


@cache
def of(name: str, precision: str = "model") -> ShortModel:
    own = case(name)
    return own.short(precision=precision)


def candidate(mesh: str, zero: int) -> Candidate:
    """Two microbatches; as many layers in each stage."""
    where = Mesh.parse(mesh)
    samples = SAMPLES // where.axis_size("dp") // where.axis_size("ep") // 2
    stages = where.axis_size("pp")
    layers = (LAYERS // stages,) * stages
    return Candidate(where, samples, 2, "1f1b", 1, zero, "none", layers)


def on_paper(name: str, mesh: str, zero: int, precision: str = "model") -> Estimate:
    cluster = cluster_of(f"{Mesh.parse(mesh).size}xA100-80GB")
    prices = make_prices(of(name, precision), cluster)
    return run_on_paper(candidate(mesh, zero), prices, cluster)


CASES = [
    ("mixtral", "ep=2", 3, "model"),
    ("mixtral", "pp=2,ep=2", 3, "model"),
    ("mixtral", "dp=2,ep=2", 1, "bf16"),
    ("switch", "pp=2,ep=2", 1, "model"),
    ("switch", "dp=2,ep=2", 2, "model"),
    ("switch", "ep=2", 3, "bf16"),
    ("mixtral", "dp=2,ep=2", 3, "model"),
    ("mixtral", "ep=2,tp=2", 2, "model"),
    ("switch", "ep=4", 2, "bf16"),
    # Backwards of one sample have fewer nodes than those of two.
    ("switch", "ep=4", 2, "model"),
    ("switch", "dp=2,ep=2", 2, "bf16"),
    # Experts' weights are read through views that the forward makes.
    ("switch", "dp=2", 3, "model"),
]


@pytest.mark.slow
@pytest.mark.matrix(quick=1, daily=4)
@pytest.mark.parametrize(("name", "mesh", "zero", "precision"), CASES)
def test_memory_on_paper_is_that_of_the_program(name, mesh, zero, precision) -> None:
    """Ranks of ep share all but experts, those of dp experts too."""
    found = on_paper(name, mesh, zero, precision)
    plan = plan_of(found.candidate, of(name, precision))
    program = compile_program(case(name).trace(plan.lowering), plan, PLAIN)
    for terms, held in zip(found.memory, program.memory, strict=True):
        for term in ("parameters", "gradients", "optimizer", "buffers"):
            assert terms[term] == pytest.approx(getattr(held, term))
        assert 0.999 < sum(terms.values()) / held.total < 1.005


def test_samples_beyond_two_have_no_more_kernels() -> None:
    """Backwards of two samples have nodes that those of one have not: what more samples
    take is not on the line through both."""
    devices, plain = cluster_of("2xA100-80GB"), of("switch")
    wanted = candidate("dp=2", 3)
    assert wanted.samples == 4
    found = run_on_paper(wanted, make_prices(plain, devices), devices)
    plan = plan_of(found.candidate, plain)
    program = compile_program(case("switch").trace(plan.lowering), plan, devices)
    compiled = estimate_program(program, devices)
    assert found.seconds == pytest.approx(compiled.seconds, rel=1e-4)
    assert found.peak == pytest.approx(compiled.peak, rel=1e-6)


def test_ranks_with_other_experts_reduce_none_of_them() -> None:
    """Over ep go the gradients of what is not experts, and only those, of which some
    are not waited for."""
    mesh, cluster = Mesh.parse("ep=2"), cluster_of("2xA100-80GB")
    shared = candidate("ep=2", 1)
    (account,) = accounts_of(shared, make_prices(of("mixtral"), cluster))
    experts = account.experts.trained
    others = account.held.trained - experts
    assert experts > others
    assert [e.bytes for e in account.pending if e.axes == ("ep",)] == [others]
    link = cluster.link(mesh, ("ep",))
    parts = on_paper("mixtral", "ep=2", 1).parts
    calls = account.backward.scattered.calls
    moved = calls * link.seconds("reduce_scatter", others / calls)
    assert moved / 4 < parts["gradients ep"] < moved


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("switch", 0.2), ("mixtral", 0.3)])
def test_experts_are_split_where_they_do_not_fit_whole(name, share) -> None:
    """Of what data parallel ranks take, without tensor or pipeline parallelism."""
    whole = on_paper(name, "dp=4", 0).peak
    small = with_memory(cluster_of("8xA100-80GB"), share * whole)
    decided = {"mesh": Mesh.parse("pp=1,tp=1"), "microbatches": 2}
    best = find_plans(of(name), small, SAMPLES, **decided).best[0]
    assert best.candidate.mesh.axis_size("ep") > 1 and best.peak <= share * whole


@pytest.mark.slow
def test_experts_are_routed_over_ranks_where_that_is_cheaper() -> None:
    """On slow links few rows go to their experts in less time than whole experts'
    gradients are reduced, many rows in more; on fast links whole experts are faster."""
    cluster = cluster_of("4xA100-80GB")
    decided = {"mesh": Mesh.parse("pp=1,tp=1"), "microbatches": 1, "zero": 0}

    def best(links: float, batch: int) -> str:
        levels = tuple(replace(x, bytes_per_second=links) for x in cluster.levels)
        of_links = replace(cluster, levels=levels)
        found = find_plans(of("mixtral"), of_links, batch, **decided).best[0]
        return str(found.candidate.mesh)

    assert best(1e8, SAMPLES) == "ep=4"
    assert best(1e8, 16 * SAMPLES) == best(3e11, SAMPLES) == "dp=4"
