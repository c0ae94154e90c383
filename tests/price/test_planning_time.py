"""What keeps planning fast: work that is done once, and gives what it gave before."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import Block, Stack, plain_gpt, token_batch
from torch import Tensor, nn

from autopar.gc_paused import gc_paused
from autopar.machine.hardware import cluster_of, with_memory
from autopar.options import make_plan, read_bytes
from autopar.passes.mesh import Mesh
from autopar.passes.price import price_layers
from autopar.passes.price.price_layers import cut_layers
from autopar.passes.search.by_formula import (
    layer_mesh,
    least_bytes,
    least_computing,
    least_seconds,
    least_states,
    make_timer,
    prices_of,
    rough,
    way_of,
)
from autopar.passes.search.candidates import Space, candidates
from autopar.passes.search.search import (
    Ranked,
    Ranking,
    parts_of,
    run_on_paper,
    search,
)
from autopar.passes.stage.differentiate import (
    Draft,
    differentiate,
    finish,
    join,
    join_both,
)
from autopar.passes.stage.local_stage import LocalStage
from autopar.planner.planner import (
    find_plans,
    make_prices,
    make_space,
)


@pytest.mark.slow
def test_candidates_that_share_their_timing_are_ranked_as_each_by_itself() -> None:
    case = plain_gpt(layers=4)
    cluster = cluster_of("8xA100-80GB")
    prices = make_prices(case.short(), cluster)
    space = Space(cluster, 8, 4, {"tp": (1, 2)}, recompute=("none",))
    timed = make_timer(cluster)
    every = list(candidates(space))
    shared = [rough(candidate, space, prices, timed) for candidate in every]
    alone = [rough(candidate, space, prices) for candidate in every]
    assert len({found[0] for found in alone if found}) > len(every) / 8
    assert shared == alone
    # What cannot fit by the least that it takes need not be ranked.
    peaks = {c: found[1] for c, found in zip(every, alone, strict=True) if found}
    least = {c: least_bytes(c, space.runs, prices_of(c, prices), timed) for c in peaks}
    assert all(least[c] <= peak for c, peak in peaks.items())
    assert sum(least[c] > 0.5 * peak for c, peak in peaks.items()) > len(peaks) / 4
    # Nor what shares its mesh and ZeRO with what cannot for its weights alone.
    states: dict[object, set[float]] = {}
    for c in peaks:
        known = least_states(c, space.runs, prices_of(c, prices), timed)
        states.setdefault((c.mesh, c.zero), set()).add(known)
        assert known <= least[c]
    assert {len(each) for each in states.values()} == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", [pytest.param("model", marks=pytest.mark.nightly), "bf16"]
)
def test_ranks_hold_and_do_their_part_of_what_fewer_ranks_have(precision) -> None:
    """What is known of a split bounds the bytes and seconds of a finer one."""
    case = plain_gpt(layers=4, batch=8)
    cluster = cluster_of("8xA100-80GB")
    of = case.short(precision=precision)
    prices, timed = make_prices(of, cluster), make_timer(cluster)
    space = Space(cluster, 8, 4, {"tp": (1, 2, 4), "cp": (1, 2)})
    every = list(candidates(space))
    meshes = {layer_mesh(c.mesh) for c in every}
    bounds = 0
    for c in every[:: len(every) // 300]:
        if (priced := rough(c, space, prices, timed)) is None:
            continue
        for fewer in meshes:
            if not (parts := parts_of(layer_mesh(c.mesh), fewer)):
                continue
            costs = prices_of(replace(c, mesh=fewer), prices)
            least = least_bytes(c, space.runs, costs, timed)
            assert least <= priced[1] * parts, (c, fewer)
            shortest = least_seconds(c, space.runs, costs, timed)
            assert shortest <= priced[0] * parts, (c, fewer)
            assert least_computing(c, space.runs, costs) <= shortest, (c, fewer)
            bounds += parts > 1
    assert bounds > 100


class Biased(Block):
    """Scores have a bias [heads, s, s] that is computed from weights: all samples share
    what is kept of it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(16, 4 * 16)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        bias = self.bias(torch.eye(16)).unflatten(-1, (4, 16)).transpose(0, 1).tanh()
        return self.join((q @ k.mT + bias).softmax(-1) @ v)


def loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.slow
@pytest.mark.parametrize("block", [Block, Biased])
def test_prices_of_one_sample_bound_the_bytes_of_more(block) -> None:
    case = Case(Stack(block), token_batch(batch=32), loss)
    cluster = cluster_of("8xA100-80GB")
    prices, timed = make_prices(case.short(), cluster), make_timer(cluster)
    space = Space(cluster, 32, 4, {"tp": (1, 2)}, recompute=("none", "full"))
    close = 0
    for c in [c for c in candidates(space) if c.samples > 1]:
        if (priced := rough(c, space, prices, timed)) is None:
            continue
        one = prices(way_of(c)._replace(samples=1))
        least = least_bytes(c, space.runs, one, timed, times=c.samples)
        assert least <= priced[1], c
        close += least > 0.8 * priced[1]
    assert close > 20


@pytest.mark.slow
def test_memory_by_formula_is_that_of_a_schedule() -> None:
    """Also of what several stages of a rank make for a whole step."""
    case = plain_gpt(layers=8, heads=32, seq=8)
    cluster = cluster_of("8xA100-80GB")
    of = case.short(precision="bf16")
    prices, timed = make_prices(of, cluster), make_timer(cluster)
    mesh = Mesh.parse("pp=2,dp=4")
    space = Space(cluster, 32, 8, {}, mesh=mesh, recompute=("full",))
    several = 0
    for candidate in candidates(space):
        _, peak, complete = rough(candidate, space, prices, timed)
        exact = run_on_paper(complete, prices, cluster).peak
        assert 0.9 * exact < peak < 1.1 * exact, complete
        several += complete.stages_per_rank > 2
    assert several > 8


@pytest.mark.slow
def test_what_is_not_priced_would_not_be_picked(monkeypatch) -> None:
    """Also where only what is computed again fits, and by prices for fewer ranks."""
    case = plain_gpt(layers=4)
    of = case.short()
    usual = cluster_of("8xA100-80GB")
    prices = make_prices(of, usual)  # which do not depend on the memory

    def search_within(memory: str) -> Ranking:
        cluster = with_memory(usual, read_bytes(memory))
        space = make_space(of, cluster, 32, sizes={"tp": (1, 2), "cp": (1, 2)})
        return search(space, prices)

    for memory in ("1MB", "0.5MB"):
        bounded = search_within(memory)
        for bound in ("_is_slow", "_known"):
            with monkeypatch.context() as without:
                without.setattr(Ranked, bound, lambda self, candidate: ())
                every = search_within(memory)
            assert bounded.best == every.best
            assert len(bounded.priced) < 0.9 * len(every.priced)


@pytest.fixture
def joined(monkeypatch) -> list[object]:
    """The stages that were differentiated for prices."""
    found: list[object] = []

    def counted(draft):
        found.append(draft.stage)
        return join_both(draft)

    monkeypatch.setattr(price_layers, "join_both", counted)
    return found


@pytest.mark.slow
def test_work_grows_neither_with_layers_nor_with_devices(joined) -> None:
    found = []
    for layers, devices in ((4, 4), (16, 32)):
        case = plain_gpt(layers=layers)
        of = case.short()
        joined.clear()
        find_plans(of, cluster_of(f"{devices}xA100-80GB"), 32, sizes={"tp": (1, 2)})
        found.append(len(joined))
    # Its first, middle, last and last two layers, and for plans without a pipeline the
    # whole model; three microbatch sizes; the backward in one piece and in halves;
    # layers whole and split on tp.
    ways = 3 * 2 * 2
    assert all(4 * ways < n < 5 * ways for n in found)
    assert found[1] <= found[0]


def test_all_layers_together_are_priced_for_a_rank_that_has_them_all(joined) -> None:
    of = plain_gpt(layers=4).short()
    cluster = cluster_of("4xA100-80GB")
    for mesh, most in (("pp=2,dp=2", 2), ("dp=4", 3)):
        joined.clear()
        plans = find_plans(of, cluster, 32, Mesh.parse(mesh), sizes={})
        assert plans.best and max(len(stage.layers) for stage in joined) == most


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("halves", [False, True])
def test_one_joint_serves_one_policy_after_another(halves) -> None:
    case = plain_gpt(layers=3)
    of = case.short()
    plan = make_plan("dp=2,tp=2", microbatches=2, zero=3)
    stage = cut_layers(of.named, plan, of.starts).stages[0]
    sizes = plan.sizes
    made = sizes, dict.fromkeys(sizes, 0)
    joint = join(Draft(stage, *made, halves=halves))
    texts = []
    for policy in ("full", "none", "full"):
        policies = dict.fromkeys(stage.layers, policy)
        local = finish(joint, policies)
        assert local == differentiate(stage, *made, policies, halves=halves)
        texts.append(text(local))
    assert texts[0] == texts[2] != texts[1]


def text(local: LocalStage) -> str:
    return "\n".join(map(str, local.nodes))


def test_no_cycles_are_looked_for_within_and_again_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()
    assert not gc.get_freeze_count()
