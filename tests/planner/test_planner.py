"""The planner: accounts of layers, balanced stages, and what it chooses."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from models import gpt2, llama, plain_gpt, switch_gpt

from autopar.capture.shorten import find_layers, of_few_layers
from autopar.machine.hardware import cluster_of, with_memory
from autopar.models.load import load_model
from autopar.options import make_plan
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.dims.name_dims import name_dims
from autopar.passes.layers import Layers
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import PlanError
from autopar.passes.price.account import Account
from autopar.passes.price.cluster import PLAIN, Cluster
from autopar.passes.price.price import price
from autopar.passes.price.price_layers import Way, price_layers
from autopar.passes.search.balance_layers import balance_layers
from autopar.passes.search.candidates import Space
from autopar.passes.shard.insert_collectives import insert_collectives
from autopar.passes.shard.propagate import propagate
from autopar.passes.stage.differentiate import differentiate
from autopar.passes.stage.split_stages import split_stages
from autopar.planner.best_plan import capture_few_layers
from autopar.planner.planned import batch_for
from autopar.planner.planner import (
    ShortModel,
    capture_short,
    find_plans,
    make_prices,
    make_space,
    open_ops,
    plan_of,
)
from autopar.planner.request import PlanRequest
from autopar.verify import verify
from examples.gpt import GPT, Config

DEVICE = cluster_of("8xA100-80GB").device


# --- Layers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "path", "period"),
    [(plain_gpt, "blocks", 1), (gpt2, "transformer.h", 1), (llama, "model.layers", 1)],
)
def test_layers_that_are_alike_are_found(build, path, period) -> None:
    found = find_layers(build(layers=6).model)
    assert found is not None
    assert (found.path, found.total, found.period, found.kept) == (path, 6, period, 3)


def test_a_pattern_of_layers_is_found() -> None:
    model = plain_gpt(layers=6).model
    for block in model.blocks[1::2]:
        block.attention.dropout = 0.5
    found = find_layers(model)
    assert found is not None and (found.period, found.kept) == (2, 6)


@pytest.mark.slow
def test_part_of_a_pattern_after_its_repeats_is_the_model_s_end() -> None:
    """As Gemma 3 has 62 layers of a pattern of 6."""
    case = plain_gpt(layers=9)
    for block in case.model.blocks[1::2]:
        block.attention.dropout = 0.5
    of = case.short()
    assert of.layers is not None and (of.layers.kept, of.runs) == (7, 4)
    assert of.starts == ("blocks.0", "blocks.2", "blocks.4")
    plan = make_plan("tp=2", microbatches=4)
    prices = price_layers(of.named, plan, of.starts, DEVICE, False)
    cuts = of.layers.starts[1:3]
    whole = of_whole_model(case, "tp=2", cuts, microbatches=4)
    parts = [(True, 1, False), (False, 1, False), (False, 2, True)]
    for account, part in zip(whole, parts, strict=True):
        same(prices.stage(*part), account)
    # Labels are of all layers then, or the plan would be refused.
    chosen = open_ops(of, plan, PLAIN).choose().plan
    assert any("blocks" in op for op in chosen.op_shardings["tp"])
    assert compile_program(case.trace(), chosen, PLAIN).mesh == chosen.mesh


@pytest.mark.parametrize(
    ("usual", "other"), [(0.0, 0.5), (F.relu, F.gelu), ((8, 0), (4, 0))]
)
def test_layers_that_differ_are_not_taken_for_alike(usual, other) -> None:
    model = plain_gpt(layers=5).model
    for i, block in enumerate(model.blocks):
        block.mlp.own = other if i == 3 else usual
    assert find_layers(model) is None


def test_the_model_is_as_before() -> None:
    model = plain_gpt(layers=6).model
    before = list(model.named_parameters())

    def stop(layers: Layers) -> None:
        assert len(model.blocks) == layers.kept == 3
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        of_few_layers(model, stop)
    assert [n for n, _ in before] == [n for n, _ in model.named_parameters()]


# --- Accounts ----------------------------------------------------------------------


def of_whole_model(case, mesh: str, cuts: tuple[str, ...], **options) -> list[Account]:
    """Accounts for each stage of the whole model, compiled as it is."""
    plan = replace(make_plan(f"pp={len(cuts) + 1},{mesh}", **options), cuts=cuts)
    named = name_dims(normalize(case.trace()))
    staged = split_stages(insert_collectives(propagate(named, plan)), PLAIN)
    sizes = plan.sizes
    return [
        price(
            differentiate(s, sizes, dict.fromkeys(sizes, 0), s.policies(plan)),
            DEVICE,
        )
        for s in staged.stages
    ]


@pytest.mark.slow
@pytest.mark.matrix(quick=0, daily=4)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("mesh", ["tp=2", "cp=2", "tp=1"])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_accounts_of_any_depth_are_those_of_the_whole_model(
    build, mesh, recompute
) -> None:
    case = build(layers=7)
    options = {"microbatches": 4, "recompute": recompute}
    of = case.short()
    assert of.layers is not None and of.layers.kept == 3
    prices = price_layers(
        of.named, make_plan(mesh, **options), of.starts, DEVICE, False
    )
    starts = of.layers.starts
    whole = of_whole_model(case, mesh, (starts[2], starts[5]), **options)
    parts = [(True, 2, False), (False, 3, False), (False, 2, True)]
    for account, part in zip(whole, parts, strict=True):
        same(prices.stage(*part), account)
    (one,) = of_whole_model(case, mesh, (), **options)
    same(prices.stage(True, 7, True), one)


@pytest.mark.matrix(quick=6)
@pytest.mark.parametrize("samples", [1, 2, 4, 8])
@pytest.mark.parametrize("mesh", ["tp=2", "tp=1"])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_prices_are_those_of_microbatches_of_that_many_samples(
    build, mesh, samples
) -> None:
    """What is gathered along seq is copied but from a single sample, and positions of
    a single one have the gradient of the sum."""
    of = build(layers=5, batch=32).short()
    plan = make_plan(mesh, microbatches=of.batch // samples)
    direct = price_layers(of.named, plan, of.starts, DEVICE, False)
    prices = make_prices(of, replace(PLAIN, device=DEVICE))
    way = Way(plan.mesh, "none", False, samples)
    same(
        prices(way).stage(True, 5, True),
        direct.stage(True, 5, True),
    )


@pytest.mark.parametrize("spec", ["hf:gpt2?n_layer=4", "hf:qwen3?num_hidden_layers=4"])
def test_a_model_is_planned_by_the_shapes_of_a_batch(spec) -> None:
    loaded = load_model(spec, device="meta")
    planned = capture_few_layers(loaded, PlanRequest(PLAIN), 16, 64)
    real = capture_short(loaded.model, batch_for(loaded, 16, 64))
    assert str(planned.named) == str(real.named) and planned.layers == real.layers


def same(got: Account, wanted: Account) -> None:
    found, known = amounts(asdict(got)), amounts(asdict(wanted))
    assert len(known) > 100 and found.keys() >= known.keys()
    as_shared = {"gathered", "scattered", "made", "made_of_experts"}
    for key, amount in known.items():
        # Of a compiled stage nothing is counted as if ranks shared parameters.
        by_block = key[-1].startswith(("zero_", "ready_", "arrived_"))
        if not {"tied", "alone", *as_shared} & {*key} and not by_block:
            assert found[key] == pytest.approx(amount, rel=1e-6, abs=1e-12), key


def amounts(data: object) -> dict[tuple[str, ...], float]:
    """Numbers of records within records, by the names on the way to them."""
    if isinstance(data, tuple):
        data = {f"{e['kind']} {e['axes']}": e for e in data if isinstance(e, dict)}
    if isinstance(data, dict):
        inner = {name: amounts(x) for name, x in data.items()}
        return {(n, *key): x for n, found in inner.items() for key, x in found.items()}
    return {(): data} if isinstance(data, int | float) else {}


# --- Stages ------------------------------------------------------------------------


def slowest(counts, layer: float, before: float, after: float) -> float:
    extra = [before, *[0.0] * (len(counts) - 2), after]
    return max(n * layer + x for n, x in zip(counts, extra, strict=True))


def test_stages_are_balanced_as_by_brute_force() -> None:
    draw = random.Random(0)
    for _ in range(500):
        stages = draw.randint(2, 4)
        layers = draw.randint(stages, 9)
        costs = draw.random(), 3 * draw.random(), 3 * draw.random()
        found = balance_layers(layers, stages, *costs)
        assert found is not None and sum(found) == layers and min(found) > 0
        best = min(
            slowest(counts, *costs)
            for counts in itertools.product(range(1, layers + 1), repeat=stages)
            if sum(counts) == layers
        )
        assert slowest(found, *costs) == pytest.approx(best)


def test_more_stages_than_layers() -> None:
    assert balance_layers(3, 4, 1.0, 0.0, 0.0) is None


# --- What is chosen ------------------------------------------------------------------


def small(devices: int = 4, memory: float = 80e9) -> Cluster:
    return with_memory(cluster_of(f"{devices}xA100-80GB"), memory)


@pytest.mark.slow
@pytest.mark.parametrize("build", [plain_gpt, switch_gpt])
def test_the_plan_compiles_and_is_right(build) -> None:
    case = build().double()
    of = case.short()
    for mesh in ("pp=2", "tp=2", "pp=2,tp=2"):
        found = find_plans(of, small(), 8, mesh=make_plan(mesh).mesh)
        plan = plan_of(found.best[0].candidate, of)
        traced = case.trace()
        program = compile_program(traced, plan, PLAIN)
        assert program.plan.mesh.size == 4
        verify(program, case.model, case.batch, case.loss_fn).check()


@cache
def large() -> ShortModel:
    """Large enough that computing takes most of the time."""
    with torch.device("meta"):
        sizes = Config(layers=6, width=1024, heads=16, context=1024, vocab=32000)
        model = GPT(sizes)
    ids = torch.zeros(4, 1024, dtype=torch.int64)
    return capture_short(model, {"ids": ids, "labels": ids.clone()})


@pytest.mark.slow
def test_what_fits_is_only_data_parallel() -> None:
    best = find_plans(large(), small(), 32).best[0].candidate
    assert str(best.mesh) == "dp=4" and best.recompute == "none" and best.zero == 0


@pytest.mark.slow
def test_with_less_memory_more_is_shared_out_or_made_again() -> None:
    roomy = find_plans(large(), small(), 32).best[0]
    for share in (0.6, 0.3):
        limit = roomy.peak * share
        tight = find_plans(large(), small(memory=limit), 32).best[0]
        assert tight.peak <= limit
        assert tight.seconds >= roomy.seconds
    assert tight.candidate.zero or tight.candidate.recompute != "none"


@pytest.mark.slow
def test_a_batch_that_no_mesh_divides() -> None:
    case = plain_gpt()
    of = case.short()
    with pytest.raises(PlanError, match="divides a batch of 7 samples"):
        find_plans(of, small(), 7, mesh=make_plan("dp=4").mesh)
    with pytest.raises(PlanError, match="a global batch of 0"):
        find_plans(of, small(), 0)


@pytest.mark.slow
def test_experts_are_split_over_as_many_ranks_as_hold_some() -> None:
    case = switch_gpt(batch=16)
    of = case.short()
    found = find_plans(of, small(8), 16, mesh=make_plan("ep=8").mesh)
    assert str(found.best[0].candidate.mesh) == "ep=8"


@pytest.mark.slow
def test_sequences_and_products_are_split_over_nodes_where_that_may_pay() -> None:
    def space(seq: int, devices: str) -> Space:
        case = plain_gpt(layers=1, heads=8, seq=seq, batch=2)
        of = case.short()
        return make_space(of, cluster_of(devices), 2)

    assert max(space(8192, "64xA100-80GB").sizes["cp"]) == 8  # of its node
    # Of 16 ranks each has as many tokens as are long by themselves.
    assert max(space(2**17, "64xA100-80GB").sizes["cp"]) == 16
    # Labels are often the text moved by one, and so one token less than a power.
    assert space(63, "8xA100-80GB").sizes["cp"] == (1,)
    assert max(space(64, "8xGH200").sizes["tp"]) == 8  # a device is a node
    assert max(space(64, "64xA100-80GB").sizes["tp"]) == 8
