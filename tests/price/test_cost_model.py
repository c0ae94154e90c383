"""One cost model: the planner, `compile`, `simulate`, `explain` and `inspect` say the
same of a plan, in seconds and in bytes."""

import random
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from cases import Case
from models import llama, mixture, next_token_loss, plain_gpt, switch_gpt

from autopar.machine.hardware import cluster_of
from autopar.options import make_plan
from autopar.passes.mesh import Mesh
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import CONTEXT_PARALLEL, RECOMPUTE
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.estimate import Estimate
from autopar.passes.program import Program
from autopar.passes.read_program import read_program
from autopar.passes.schedule.make_schedule import SCHEDULES
from autopar.passes.schedule_stages import estimate_program
from autopar.passes.search.balance_layers import balance_ranks
from autopar.passes.search.search import run_on_paper
from autopar.passes.shard.query_groups import find_groups, with_groups
from autopar.planner.planner import ShortModel, make_prices, plan_of
from autopar.reports.inspection import report_data
from autopar.reports.simulation import simulate_estimate, simulate_program
from examples.gpt import GPT, Config

LAYERS, SAMPLES, SEQ = 4, 16, 256
MESHES = (
    *("dp=4", "tp=4", "dp=2,tp=2", "fsdp=4", "dp=2,fsdp=2", "fsdp=2,tp=2"),
    *("cp=2,tp=2", "dp=2,cp=2", "pp=2,dp=2", "pp=2,fsdp=2", "pp=2,tp=2", "pp=4"),
)
OF_EXPERTS = ("ep=4", "dp=2,ep=2", "fsdp=2,ep=2", "ep=2,tp=2", "pp=2,ep=2")
# A plan that shares out parameters is priced from layers whose ranks share nothing.
# What compiling then moves out of the loop, and how many kernels add what arrives of
# gradients, the planner does not see: a few launches, much of a tiny model's step. Its
# peaks are of stages put together of pieces, each with what is next to it.
WIDE, TINY = 0.01, 0.05
# What is counted once a step is priced of the short model's samples, not of a rank's;
# of one microbatch it is in the forward, where some of it is kept.
COUNTED = 1e-4


def wide_gpt() -> Case:
    """As wide as what launches take does not matter; there is none of it."""
    with torch.device("meta"):
        model = GPT(Config(LAYERS, 1024, 16, SEQ, 8192, 0.0))
    ids = torch.zeros(SAMPLES, SEQ, dtype=torch.int64)
    return Case(model, {"ids": ids, "labels": ids.clone()})


def wide_llama() -> Case:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=1024,
        intermediate_size=2752,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=8192,
        max_position_embeddings=SEQ,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.zeros(SAMPLES, SEQ, dtype=torch.int64)
    return Case(model, {"input_ids": ids, "labels": ids.clone()}, next_token_loss)


MODELS: dict[str, Callable[[], Case]] = {
    "tied": lambda: plain_gpt(layers=LAYERS, batch=SAMPLES),
    "untied": lambda: plain_gpt(layers=LAYERS, batch=SAMPLES, tied=False),
    "llama": lambda: llama(layers=LAYERS, heads=8, kv_heads=4, batch=SAMPLES),
    "mixtral": lambda: mixture("mixtral", {"batch": SAMPLES}, num_hidden_layers=LAYERS),
    "shared": lambda: mixture(
        "qwen2_moe",
        {"batch": SAMPLES},
        num_hidden_layers=LAYERS,
        shared_expert_intermediate_size=32,
    ),
    "switch": lambda: switch_gpt(layers=LAYERS, batch=SAMPLES),
    "top 2": lambda: switch_gpt(layers=LAYERS, batch=SAMPLES, top_k=2),
    "wide": wide_gpt,
    "wide llama": wide_llama,
}
MIXTURES = ("mixtral", "shared", "switch", "top 2")
model = cache(lambda name: MODELS[name]())


@cache
def captured(name: str, precision: str, loss_chunks: int = 1) -> ShortModel:
    return model(name).short(precision=precision, loss_chunks=loss_chunks)


class Drawn(NamedTuple):
    """A model by its name, a precision, devices, decisions for four of them."""

    model: str
    precision: str
    devices: Cluster
    candidate: Candidate
    loss_chunks: int = 1


def draw(seed: int) -> Drawn:
    chance = random.Random(seed)
    name = chance.choice(tuple(MODELS))
    experts = 2 * OF_EXPERTS if name in MIXTURES else ()
    precision = chance.choice(("model", "bf16", "bf16-stream"))
    groups = find_groups(captured(name, precision).named)
    mesh = with_groups(Mesh.parse(chance.choice((*MESHES, *experts))), groups)
    axes, pp = dict(mesh.axes), mesh.axis_size("pp")
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
    shared = axes.keys() & {"dp", "fsdp", "cp", "ep"}
    zero = chance.choice((0, 1, 2, 3)) if shared else 0
    zero = max(zero, 1) if "fsdp" in axes else zero
    own = SAMPLES // mesh.sample_ranks
    microbatches = chance.choice([n for n in (1, 2, 4, 8) if n <= own])
    microbatches = max(microbatches, pp)
    recompute = chance.choice(RECOMPUTE)
    context = chance.choice(tuple(CONTEXT_PARALLEL)) if "cp" in axes else "gather"
    decided = (schedule, per_rank, zero, recompute, layers, context)
    candidate = Candidate(mesh, own // microbatches, microbatches, *decided)
    devices = cluster_of(chance.choice(("4xCPU", "4xA100-80GB", "4xH100")))
    return Drawn(name, precision, devices, candidate)


def views(drawn: Drawn) -> tuple[Estimate, Program]:
    name, precision, devices, candidate, loss_chunks = drawn
    of = captured(name, precision, loss_chunks)
    e = run_on_paper(candidate, make_prices(of, devices), devices)
    plan = plan_of(e.candidate, of)
    program = compile_program(model(name).trace(plan.lowering), plan, devices)
    return e, program


def same_by_all(drawn: Drawn) -> None:
    e, program = views(drawn)
    devices, candidate = drawn.devices, e.candidate
    shares = candidate.shares > 0
    exact = not shares and candidate.microbatches > 1
    size = WIDE if drawn.model.startswith("wide") else TINY
    seconds = COUNTED if exact and candidate.mesh.data_axes else 1e-6
    seconds = seconds if exact else size
    contention = devices.contention(program.mesh)
    compiled = estimate_program(program, devices)
    told = f"{drawn.model}, {drawn.precision}, {e.candidate}"
    assert compiled.seconds == pytest.approx(e.seconds, rel=seconds), told
    for mine, planned in zip(compiled.memory, e.memory, strict=True):
        ratio = sum(planned.values()) / sum(mine.values())
        assert 1 - size <= ratio <= 1 + size, f"{told}: {ratio}"
    for stage, planned in zip(compiled.stages, e.stages, strict=True):
        assert stage.total == pytest.approx(planned.total, rel=1.5 * seconds), told
        if exact:
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
@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(12), 101])
def test_all_views_of_a_plan_say_the_same(seed: int) -> None:
    same_by_all(draw(seed))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_all_views_of_shares_that_are_replicated_say_the_same(zero: int) -> None:
    mesh = Mesh.parse("dp=2,fsdp=2")
    candidate = Candidate(mesh, 1, 4, "1f1b", 1, zero, "none", (LAYERS,))
    same_by_all(Drawn("tied", "model", cluster_of("4xA100-80GB"), candidate))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["untied", "wide llama"])
@pytest.mark.parametrize(
    ("mesh", "schedule", "zero", "recompute", "layers"),
    [
        ("dp=4", "1f1b", 0, "full", (4,)),
        ("dp=2,tp=2", "1f1b", 3, "none", (4,)),
        ("pp=2,dp=2", "zb-h1", 1, "selective", (2, 2)),
        ("dp=2,cp=2", "1f1b", 2, "elementwise", (4,)),
    ],
)
def test_all_views_of_a_loss_by_chunks_say_the_same(
    mesh, schedule, zero, recompute, layers, name
) -> None:
    of_devices = cluster_of("4xA100-80GB")
    parsed = Mesh.parse(mesh)
    samples = SAMPLES // (4 * parsed.sample_ranks)
    wanted = parsed, samples, 4, schedule, 1, zero, recompute, layers
    same_by_all(Drawn(name, "bf16", of_devices, Candidate(*wanted), 4))


def both_accounts(
    zero: int, schedule: str, layers: tuple[int, ...], of: str, again: str = "none"
) -> None:
    """What stages of so many layers hold, with two ranks for each."""
    mesh = Mesh((("pp", len(layers)), ("dp", 2)))
    wanted = Candidate(mesh, 2, 4, schedule, 1, zero, again, layers)
    devices = cluster_of(f"{mesh.size}xA100-80GB")
    e, program = views(Drawn(of, "model", devices, wanted))
    compiled = estimate_program(program, devices)
    for mine, planned in zip(compiled.memory, e.memory, strict=True):
        assert sum(planned.values()) == pytest.approx(sum(mine.values()), rel=3e-3)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_no_block_is_beside_a_layer_where_its_stage_ends(schedule: str) -> None:
    """Stages of two layers: each has a neighbour on one side."""
    both_accounts(2, schedule, (2, 2), "untied")


@pytest.mark.parametrize(
    ("layers", "of"),
    [((2, 2), "untied"), ((1, 1, 1, 1), "untied"), ((2, 2), "wide llama")],
)
def test_functions_end_where_weights_are_waited_for(layers, of) -> None:
    """What the first of them is given is let go of before these are whole, and what is
    computed with them is made after their rows are gone."""
    both_accounts(3, "1f1b", layers, of)


@pytest.mark.parametrize("again", ["none", "full"])
def test_input_halves_are_beside_what_layers_after_kept_for_weight_halves(
    again,
) -> None:
    both_accounts(0, "zb-h1", (2, 2), "wide", again)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("layers", [(2, 2), (4,)])
def test_a_table_of_both_ends_is_no_part_of_a_block_of_the_last(layers, zero) -> None:
    """It is whole for a forward, and its gradient to the end of a backward."""
    both_accounts(zero, "1f1b", layers, "tied")


@pytest.mark.slow
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
    program = compile_program(model("tied").trace(plan.lowering), plan, devices)
    estimated = estimate_program(program, devices)
    for mine, told in zip(estimated.memory, program.memory, strict=True):
        assert mine["optimizer"] == told.optimizer
        assert told.optimizer == (0 if offload else 2 * told.gradients)
        assert sum(mine.values()) == told.total
    held = sum(told.parameters for told in program.memory)
    assert held == sum(p.nbytes for p in model("tied").model.parameters())


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12, 120))
def test_all_views_of_more_plans_say_the_same(seed: int) -> None:
    same_by_all(draw(seed))
