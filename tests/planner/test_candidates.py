"""The planner's space: precision, given decisions, axes of any meaning, schedules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from cases import Case
from models import plain_gpt

from autopar.machine.hardware import cluster_of
from autopar.passes.mesh import Mesh
from autopar.passes.ops.op import OPS
from autopar.passes.ops.products import of_weight_grad
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import PlanError
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import PLAIN
from autopar.passes.price.estimate import Estimate, join_stages, step_parts
from autopar.passes.price.price_layers import Way
from autopar.passes.price.share import share
from autopar.passes.program import Program
from autopar.passes.search.candidates import candidates, meshes, searched
from autopar.passes.search.search import Ranking, accounts_of, run_on_paper, search
from autopar.planner.planner import (
    ShortModel,
    find_plans,
    make_prices,
    make_space,
    plan_of,
)
from autopar.planner.request import PlanRequest
from autopar.reports.plans import plans_table
from autopar.verify import verify

LAYERS, SAMPLES = 4, 16


@cache
def case() -> Case:
    return plain_gpt(layers=LAYERS, batch=SAMPLES, tied=False, vocab=104)


@cache
def of(precision: str = "model", tf32: bool = False) -> ShortModel:
    return case().short(precision=precision, tf32=tf32)


def compiled(candidate: Candidate, precision: str = "model") -> Program:
    plan = plan_of(candidate, of(precision))
    return compile_program(case().trace(plan.lowering), plan, PLAIN)


def even(mesh: str, schedule: str = "1f1b", stages_per_rank: int = 1) -> Candidate:
    """As many layers in each stage, two microbatches for each data parallel rank."""
    where = Mesh.parse(mesh)
    stages = where.axis_size("pp") * stages_per_rank
    samples = SAMPLES // where.axis_size("dp") // 4
    layers = (LAYERS // stages,) * stages
    return Candidate(
        where, samples, 4, schedule, stages_per_rank, 0, "none", layers, "gather"
    )


CASES = [
    even("pp=2"),
    replace(even("dp=4"), zero=1),
    replace(even("dp=2"), zero=3, recompute="full"),
    replace(even("dp=4"), zero=2, recompute="full"),
    even("pp=2,tp=2", "zb-h2"),
    even("pp=2", "zb-v", 2),
    replace(even("pp=2,dp=2", "interleaved", 2), zero=1),
    even("pp=2", "looped-bfs", 2),
    even("cp=2"),
    replace(even("cp=2"), context_parallel="ring"),
    replace(even("dp=2,cp=2"), context_parallel="ulysses"),
    replace(even("dp=2,cp=2"), context_parallel="ring", zero=3),
    even("pp=2", "gpipe"),
]


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("precision", ["model", "bf16"])
@pytest.mark.parametrize("candidate", CASES, ids=str)
def test_memory_on_paper_is_that_of_the_program(
    candidate: Candidate, precision: str
) -> None:
    cluster = cluster_of(f"{candidate.mesh.size}xA100-80GB")
    prices = make_prices(of(precision), cluster)
    found = run_on_paper(candidate, prices, cluster)
    program = compiled(candidate, precision)
    for terms, held in zip(found.memory, program.memory, strict=True):
        for term in ("parameters", "gradients", "optimizer", "buffers"):
            assert terms[term] == pytest.approx(getattr(held, term))
        # Blocks that are gathered and scattered as they come are counted on average.
        rough = 0.07 if candidate.zero else 0.02
        assert sum(terms.values()) == pytest.approx(held.total, rel=rough)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_products_of_half_the_bits_take_half_the_time(precision: str) -> None:
    """Products alone: they run at the peak of the type that is multiplied."""
    cluster, alone = cluster_of("1xA100-80GB"), even("")
    wide, low = (
        run_on_paper(alone, make_prices(of(p), cluster), cluster)
        for p in ("model", precision)
    )
    assert low.flops == pytest.approx(wide.flops, rel=0.05)
    for part in ("forward", "backward", "weight"):
        # Norms and the loss stay in float32; A100s are twice as fast in 16 bits as in
        # TF32, and that 8 times as fast as without tensor cores.
        slow = work("model", False, part)
        before, after = (work(p, True, part) for p in ("model", precision))
        assert before == slow / 8
        assert before == 0 or 0.5 <= after / before < 0.65


def work(precision: str, tf32: bool, part: str) -> float:
    cluster = cluster_of("1xA100-80GB")
    # Attention as any other product.
    cluster = replace(cluster, device=replace(cluster.device, attention=""))
    prices = make_prices(of(precision, tf32), cluster)
    return prices(Way(Mesh(()), "none", False, 1)).whole.microbatch[part].work


def test_weight_gradients_are_priced_by_what_is_multiplied() -> None:
    program = compiled(even(""), "bf16")
    (text,) = program.modules.values()
    of_weights = [op for op in OPS.values() if op.flops is of_weight_grad]
    names = [op.name.rpartition(".")[2] for op in of_weights]
    assert any(name in text for name in names), "else the prices above say nothing"


def test_shares_are_gathered_in_half_the_bits_and_scattered_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_of_it = "autopar.passes.price.estimate.exposed_seconds"
    monkeypatch.setattr(all_of_it, lambda moving, *beside: moving)
    cluster = cluster_of("4xA100-80GB")
    shared = replace(even("dp=4"), zero=1)
    parts = {
        p: run_on_paper(shared, make_prices(of(p), cluster), cluster).parts
        for p in ("model", "bf16")
    }
    link = cluster.link(shared.mesh, ("dp",))
    # Norms are in float32, so in bf16 layers, and the end, have two messages each.
    messages = {"model": LAYERS + 2, "bf16": 2 * LAYERS + 3}
    low, wide = (
        parts[p]["parameters dp"] - messages[p] * link.seconds("all_gather", 0)
        for p in ("bf16", "model")
    )
    assert 0.5 <= low / wide < 0.55
    assert parts["bf16"]["gradients dp"] == parts["model"]["gradients dp"]


def test_what_is_shared_out_moves_when_the_runtime_moves_it() -> None:
    """Zero 1: once a step, in buckets; 2: gradients by block; 3: parameters too. What
    the loss is divided by is added up once a step by all."""
    cluster = cluster_of("4xA100-80GB")
    prices, runs = make_prices(of(), cluster), {}
    for zero in (0, 1, 2, 3):
        found = run_on_paper(replace(even("dp=4"), zero=zero), prices, cluster)
        (stage,), (once,) = found.stages, found.once
        by_block = {(w.part, w.kind) for w in stage.exposed if w.axes == ("dp",)}
        runs[zero] = by_block, {term for term in once if term.endswith(" dp")}
        assert "all_reduce dp" in once
        runs[zero][1].remove("all_reduce dp")
    scattered = {("backward", "reduce_scatter")}
    gathered = {(part, "all_gather") for part in ("forward", "backward")}
    assert runs == {
        0: (set(), {"gradients dp"}),
        1: (set(), {"gradients dp", "parameters dp"}),
        2: (scattered, {"parameters dp"}),
        3: (gathered | scattered, set()),
    }


def test_what_moves_for_one_stage_goes_on_while_others_compute() -> None:
    cluster = cluster_of("4xA100-80GB")
    prices = make_prices(of(), cluster)
    two = replace(even("pp=2,dp=2", "interleaved", 2), zero=1)
    found = run_on_paper(two, prices, cluster)
    own = [
        step_parts(share(a, two, cluster.device), two.mesh, cluster, took)
        for a, took in zip(accounts_of(two, prices), found.stages, strict=True)
    ][::2]
    for term in ("gradients dp", "parameters dp"):
        each = [parts[term] for parts in own]
        assert max(each) <= found.once[0][term] < sum(each), term
    gaps = {"gradients": (3.0, 0.0), "parameters": (0.5, 0.0)}
    each = {"gradients dp": 2.0, "parameters dp": 2.0, "gradients pp": 1.0}
    told = join_stages([each, each], gaps)
    assert told == {"gradients dp": 2.0, "parameters dp": 3.5, "gradients pp": 2.0}


def test_what_moves_once_a_step_goes_by_layer() -> None:
    cluster, candidate = cluster_of("4xA100-80GB"), replace(even("dp=4"), zero=1)
    (account,) = accounts_of(candidate, make_prices(of(), cluster))
    whole = share(account, candidate, cluster.device)
    once = step_parts(whole, candidate.mesh, cluster)
    link = cluster.link(candidate.mesh, ("dp",))
    for kind, term in (("all_gather", "parameters"), ("reduce_scatter", "gradients")):
        blocks = LAYERS + 2  # with what is before and after them
        each = link.seconds(kind, account.held.read / blocks)
        assert once[f"{term} dp"] == pytest.approx(blocks * each)


@pytest.mark.slow
@pytest.mark.parametrize(
    "decided",
    [
        {"precision": "bf16", "zero": 1},
        {"schedule": "zb-v", "microbatches": 4},
        {"context_parallel": "ring"},
    ],
    ids=str,
)
def test_what_is_found_is_as_decided_and_right(decided: dict[str, Any]) -> None:
    mesh = Mesh.parse("cp=2" if "context_parallel" in decided else "pp=2")
    request = PlanRequest(cluster_of("4xA100-80GB"), mesh, options=decided)
    of_all = case().short(**request.of_all)
    found = find_plans(of_all, request.cluster, SAMPLES, **request.space)
    for e in found.best:
        for name, value in request.decided.items():
            assert getattr(e.candidate, name) == value
    plan = plan_of(found.best[0].candidate, of_all)
    assert plan.precision == decided.get("precision", "model")
    program = compile_program(case().trace(plan.lowering), plan, PLAIN)
    verify(program, case().model, case().batch, seed=3).check()


# --- axes ----------------------------------------------------------------------------


def space(devices: int = 8, **decided: Any) -> Any:
    return make_space(of(), cluster_of(f"{devices}xA100-80GB"), SAMPLES, **decided)


def test_a_shape_has_every_meaning_once() -> None:
    found = [str(mesh) for mesh in meshes(space(shape=(4, 2)))]
    assert len(found) == len(set(found))
    # Two axes each of pp, dp and tp, in either order, and both as one of them; tp at
    # most 4, as there are 4 heads.
    assert set(found) == {
        *("dp=4,pp=2", "dp=4,tp=2", "pp=4,dp=2", "pp=4,tp=2", "tp=4,dp=2", "tp=4,pp=2"),
        "dp=8",
    }


def test_a_whole_mesh_stays_in_its_order() -> None:
    found = list(meshes(space(mesh=Mesh.parse("tp=2,dp=4"))))
    assert [str(mesh) for mesh in found] == ["tp=2,dp=4"]
    assert all(m.axis_size("tp") == 2 for m in meshes(space(mesh=Mesh.parse("tp=2"))))


def test_parameters_may_be_shared_within_nodes_and_replicated_between_them() -> None:
    found = {(str(c.mesh), c.zero) for c in candidates(space(16))}
    assert {zero for mesh, zero in found if mesh == "dp=2,fsdp=8"} == {1, 2, 3}
    assert {zero for mesh, zero in found if mesh == "dp=2,fsdp=4,tp=2"} == {1, 2, 3}
    assert not any("fsdp" in str(c.mesh) for c in candidates(space(8)))
    # What is decided of the ranks' samples stays as it is.
    for wish, whole in (("dp=4", 4), ("fsdp=2", 16)):
        of_wish = meshes(space(16, mesh=Mesh.parse(wish)))
        ranks = [m.axis_size("dp") * m.axis_size("fsdp") for m in of_wish]
        assert max(ranks) == whole


def test_pipelines_may_share_parameters_within_nodes() -> None:
    """It is found out of the best plans, whose ranks of dp are on several nodes."""

    def best(wish: str) -> set[str]:
        cluster, mesh = cluster_of("32xA100-80GB"), Mesh.parse(wish)
        of_wish = make_space(of(), cluster, 64, mesh=mesh, sizes={}, zero=(3,))
        return {str(e.candidate.mesh) for e in search(of_wish, prices).best}

    prices = make_prices(of(), cluster_of("32xA100-80GB"))
    assert best("pp=2") == {"pp=2,dp=16", "pp=2,dp=2,fsdp=8"}
    assert best("pp=2,dp=16") == {"pp=2,dp=16"}


def test_shares_that_nodes_replicate_are_gathered_inside_of_them() -> None:
    """Gathers leave no node, and gradients of shares do."""
    cluster = cluster_of("32xA100-80GB")
    prices = make_prices(of(), cluster)

    def parts(mesh: str) -> dict[str, float]:
        where = Mesh.parse(mesh)
        alone = Candidate(where, 1, 4, "1f1b", 1, 3, "none", (LAYERS,))
        found = run_on_paper(alone, prices, cluster)
        return dict(found.parts)

    wide, hybrid = parts("dp=32"), parts("dp=4,fsdp=8")
    assert hybrid["all_gather fsdp"] < wide["all_gather dp"] / 3
    assert "gradients dp" in hybrid and "gradients dp" not in wide


@pytest.mark.parametrize(
    ("decided", "says"),
    [
        ({"mesh": Mesh.parse("dp=3")}, "no mesh of 8 devices with dp=3"),
        ({"shape": (3, 2)}, "no mesh of 8 devices with axes of 3, 2"),
        ({"schedule": ("zb-v",), "stages_per_rank": (3,)}, "is as the options decide"),
        ({"microbatches": 5}, "is as the options decide"),
    ],
)
def test_nothing_to_choose_from(decided: dict[str, Any], says: str) -> None:
    mesh = {"mesh": Mesh.parse("pp=2")} if "schedule" in decided else {}
    with pytest.raises(PlanError, match=says):
        find_plans(of(), cluster_of("8xA100-80GB"), SAMPLES, **{**mesh, **decided})


# --- schedules -----------------------------------------------------------------------


def test_schedules_that_cannot_gain_are_left_out() -> None:
    def tried(batch: int) -> set[str]:
        cluster, mesh = cluster_of("2xA100-80GB"), Mesh.parse("pp=2")
        every = make_space(of(), cluster, batch, mesh=mesh)
        return {c.schedule for c in candidates(every) if c.microbatches == batch}

    assert tried(16) == {*searched()} - {"looped-bfs"}
    assert tried(15) == {*searched()} - {"interleaved"}
    assert tried(20) == {"1f1b"}  # idle for a 21st: less than estimates can tell


def test_any_number_of_stages_may_be_decided() -> None:
    """Also those that a search does not try."""
    cluster, mesh = cluster_of("2xA100-80GB"), Mesh.parse("pp=2")
    space = make_space(of(), cluster, 16, mesh=mesh, stages_per_rank=(5,))
    found = {
        (c.schedule, c.stages_per_rank) for c in candidates(replace(space, runs=10))
    }
    assert found == {("interleaved", 5), ("looped-bfs", 5)}


# --- context parallel ----------------------------------------------------------------


def test_sequences_are_split_where_samples_are_few() -> None:
    assert space(8).sizes["cp"] == (1,)
    few = make_space(of(), cluster_of("32xA100-80GB"), SAMPLES)
    assert few.sizes["cp"] == (
        1,
        2,
        4,
        8,
    )  # of a node; two pieces of 16 tokens for each rank


@pytest.mark.parametrize(
    ("dropout", "tried"),
    [
        (0.0, {"gather", "ring", "ulysses"}),
        pytest.param(0.1, {"gather", "ulysses"}, marks=pytest.mark.slow),
    ],
)
def test_attention_works_in_all_ways_that_it_can(
    dropout: float, tried: set[str]
) -> None:
    few = plain_gpt(batch=SAMPLES, dropout=dropout)
    own = few.short()
    mesh = Mesh.parse("dp=2,cp=2")
    found = find_plans(own, cluster_of("4xA100-80GB"), 2, mesh)
    assert {e.candidate.context_parallel for e in found.best} == tried
    for e in found.best:
        assert e.candidate.context_parallel in str(e.candidate)


@pytest.mark.slow
def test_nothing_is_made_again_where_all_of_it_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = cluster_of("4xA100-80GB")
    found = find_plans(of(), cluster, SAMPLES)
    monkeypatch.setattr("autopar.passes.search.search.ROOMY", 0.0)
    every = find_plans(of(), cluster, SAMPLES)
    assert found.tried < every.tried
    assert found.best[0] == every.best[0]
    left_out = {x.candidate for x in every.best} - {x.candidate for x in found.best}
    assert all(candidate.recompute != "none" for candidate in left_out)


@pytest.mark.parametrize(
    ("ranks", "zero", "says"), [(512, 3, 0), (768, 3, 1), (768, 1, 0)]
)
def test_a_price_that_no_published_run_bears_out_is_called_so(
    ranks, zero, says
) -> None:
    shared = Candidate(Mesh((("dp", ranks),)), 1, 1, "1f1b", 1, zero, "full", (1,))
    estimate = Estimate(shared, 1.0, ({"parameters": 1.0},), {}, 0.0, 1.0)
    cluster = cluster_of(f"{ranks}xH100")
    other = replace(estimate, candidate=replace(shared, mesh=Mesh(()), zero=0))
    for plans in ((estimate,), (other, estimate)):
        notes = plans_table(Ranking(plans, 1, None), cluster, "").notes
        assert sum("published runs" in note for note in notes) == says
