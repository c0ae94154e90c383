"""Mixed precision: what is cast when, what moves in which dtype, and that the result
is as good as that of the untouched model under autocast."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case
from models import gpt2, llama, mixture, opt, plain_gpt, switch_gpt
from plans import model_file
from processes import run_ranks
from torch import nn

import autopar
from autopar.cli import main
from autopar.options import Options, make_plan
from autopar.passes.mesh import usual_split
from autopar.passes.plan import CONTEXT_PARALLEL, PRECISION, Plan, PlanError
from autopar.passes.program import Program
from autopar.passes.schedule.footprint import Communication
from autopar.plans.store import load_plan
from autopar.proof.ranks import VerificationFailed
from autopar.proof.reference import reference_step
from autopar.reports.inspection import (
    communication_table,
    messages_of_a_step,
    stage_table,
)
from autopar.verify import verify

MODELS = {
    "plain": lambda: plain_gpt(layers=2),
    "gpt2": lambda: gpt2(layers=2),
    "llama": lambda: llama(layers=2),
    "opt": lambda: opt(layers=2),
    "switch": switch_gpt,
    "mixtral": lambda: mixture("mixtral"),
}
CASES = [
    ("plain", "tp=1", 1, "bf16", {}),
    ("plain", "dp=2,tp=2", 2, "bf16", {"zero": 3}),
    ("plain", "dp=2", 2, "bf16", {"zero": 1}),
    ("plain", "pp=2,dp=2", 2, "bf16", {"zero": 2, "schedule": "zb-h1"}),
    ("plain", "pp=2,cp=2", 2, "fp16", {}),
    ("plain", "tp=2", 2, "fp16", {"recompute": "full"}),
    ("gpt2", "pp=2,dp=2,tp=2", 2, "bf16", {"zero": 3}),
    ("gpt2", "dp=2,cp=2", 1, "bf16", {"zero": 1}),
    ("gpt2", "dp=2,fsdp=2", 1, "bf16", {"zero": 3}),
    ("gpt2", "tp=4", 2, "fp16", {"sequence_parallel": False}),
    ("llama", "pp=2,dp=2", 2, "bf16", {"zero": 1}),
    ("llama", "cp=2,tp=2", 2, "bf16", {"recompute": "full"}),
    ("llama", "dp=2,tp=2", 1, "fp16", {"zero": 2}),
    ("llama", "dp=4", 2, "fp16", {"zero": 3}),
    ("opt", "pp=2,tp=2", 2, "bf16", {"recompute": "auto", "memory": 10**9}),
    ("switch", "dp=2,ep=2", 2, "bf16", {}),
    ("mixtral", "dp=2,ep=2", 2, "bf16", {"zero": 1}),
    ("mixtral", "pp=2,ep=2", 1, "fp16", {}),
]


@pytest.mark.matrix(quick=1, daily=7)
@pytest.mark.parametrize(("model", "mesh", "microbatches", "precision", "more"), CASES)
def test_it_computes_what_the_model_computes_under_autocast(
    model, mesh, microbatches, precision, more
):
    found = MODELS[model]().verify(mesh, microbatches, precision=precision, **more)
    assert max(found.reference_away.values()) > 0  # autocast did something


STREAMS = [
    ("plain", "dp=2,tp=2", 2, {"zero": 3}),
    ("gpt2", "pp=2,dp=2", 2, {"zero": 1}),
    ("llama", "cp=2,tp=2", 2, {"recompute": "full"}),
]


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(("model", "mesh", "microbatches", "more"), STREAMS)
def test_it_computes_what_a_model_of_bfloat16_computes(model, mesh, microbatches, more):
    found = MODELS[model]().verify(mesh, microbatches, precision="bf16-stream", **more)
    assert max(found.reference_away.values()) > 0


def test_the_reference_of_a_stream_is_the_model_in_bfloat16():
    """With gradients as wide as the parameters, which stay as they were."""
    case = plain_gpt(layers=2)
    before = {n: p.clone() for n, p in case.model.named_parameters()}
    stream = PRECISION["bf16-stream"]
    loss, grads = reference_step(case.model, case.batch, precision=stream)
    same = {n: torch.equal(p, before[n]) for n, p in case.model.named_parameters()}
    assert all(same.values())
    model = copy.deepcopy(case.model).bfloat16()
    expected, low = reference_step(model, case.batch)
    assert torch.equal(loss, expected)
    assert {g.dtype for g in grads.values()} == {torch.float32}
    assert all(torch.equal(g, low[n].float()) for n, g in grads.items())


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", "f32"), ("bf16-stream", "bf16")]
)
def test_the_residual_stream_is_as_wide_as_the_models(precision, dtype):
    """Autocast looks up embeddings in float32, and adds to them."""
    program = plain_gpt(layers=2).compile("pp=2", 2, precision=precision)
    sent = {c.dtype for c in messages_of_a_step(program) if c.kind == "send"}
    assert sent == {dtype}


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("make", [plain_gpt, gpt2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_with_padding_and_dropout(make, precision, dropout):
    case = make(layers=2, dropout=dropout, tied=False, padded=make is gpt2)
    case.verify("pp=2,dp=2,tp=2", 2, precision=precision, zero=3)


@pytest.mark.slow
def test_a_ring_sums_in_float32_what_it_passes_round_in_bfloat16():
    case = llama(layers=2)
    split = {**usual_split(), "cp": CONTEXT_PARALLEL["ring"]}
    case.verify("cp=2,tp=2", 2, precision="bf16", split=split)
    table = case.compile("cp=2", precision="bf16", split=split).communication
    shifts = {(c.part, c.dtype) for c in table if c.kind == "shift"}
    assert shifts == {("forward", "bf16"), ("backward", "bf16"), ("backward", "f32")}


# --- what moves --------------------------------------------------------------------


def moved(program: Program, kind: str, axis: str = "dp") -> dict[str, int]:
    """dtype -> bytes that a rank of the first stage brings to collectives of a step."""
    found: dict[str, int] = {}
    for c in messages_of_a_step(program):
        if (c.kind, c.axes, c.stage) == (kind, (axis,), 0):
            found[c.dtype] = found.get(c.dtype, 0) + c.bytes
    return found


def sizes_of(case: Case) -> tuple[int, int]:
    """Elements of all parameters, and of those of norms, which stay in float32."""
    sizes = {n: p.numel() for n, p in case.model.named_parameters()}
    return sum(sizes.values()), sum(n for name, n in sizes.items() if "norm" in name)


@pytest.mark.parametrize(("zero", "times"), [(1, 1), (2, 1), (3, 2)])
def test_gathers_move_bfloat16_and_gradients_are_reduced_in_float32(zero, times):
    case = plain_gpt(layers=2, tied=False)
    everything, norms = sizes_of(case)
    program = case.compile("dp=2", precision="bf16", zero=zero)
    gathered = moved(program, "all_gather")
    if zero < 3:
        assert gathered == {
            "bf16": 2 * (everything - norms) // 2,
            "f32": 4 * norms // 2,
        }
    else:  # not all is gathered again: lookups need no table backwards, sums no bias
        assert everything - norms < gathered["bf16"] < 2 * (everything - norms)
        assert 2 * norms <= gathered["f32"] <= 4 * norms
    assert moved(program, "reduce_scatter") == {"f32": 4 * everything}
    whole = case.compile("dp=2", zero=zero)
    assert moved(whole, "reduce_scatter") == {"f32": 4 * everything}


def test_without_zero_gradients_are_all_reduced_in_float32():
    case = plain_gpt(layers=2)
    program = case.compile("dp=2", 2, precision="bf16")
    tokens = {"i64": 8}
    assert moved(program, "all_reduce") == {"f32": 4 * sizes_of(case)[0], **tokens}
    assert moved(program, "all_gather") == {}


def test_activations_move_in_the_dtype_of_the_products():
    case = plain_gpt(layers=2)
    low, whole = (
        case.compile("tp=2", precision=p).communication for p in ("bf16", "model")
    )

    def bytes_of(table: tuple[Communication, ...], kind: str) -> dict[str, int]:
        rows = [c for c in table if c.kind == kind and c.part == "forward"]
        return {c.dtype: c.bytes for c in rows}

    before = bytes_of(whole, "all_gather")["f32"]
    assert bytes_of(low, "all_gather") == {"bf16": before // 2}
    # In float32: looked-up rows, and two numbers for each token of the loss.
    scattered = bytes_of(low, "reduce_scatter")
    small = 4 * 8 * 16 * (32 + 2)
    assert scattered["f32"] == small
    assert scattered["bf16"] == (bytes_of(whole, "reduce_scatter")["f32"] - small) // 2


def test_inspect_shows_precision_and_dtypes():
    program = plain_gpt(layers=1).compile("dp=2,tp=2", precision="bf16", zero=3)
    assert "precision bf16" in str(stage_table(program))
    text = str(communication_table(program))
    assert re.search(r"forward +all_gather +dp +bf16", text)
    assert re.search(r"backward +reduce_scatter +dp +f32", text)


# --- the surface -------------------------------------------------------------------


def test_a_plan_keeps_its_precision():
    plan = make_plan("dp=2", precision="fp16")
    assert (plan.precision, plan.dtype, plan.scales_loss) == (
        "fp16", torch.float16, True,
    )  # fmt: skip
    assert Plan.from_json(plan.to_json()) == plan
    assert make_plan("dp=2").dtype is None
    with pytest.raises(PlanError, match="'model', 'bf16', 'fp16'"):
        make_plan("dp=2", precision="int4")


def train(precision: str, steps: int = 4) -> dict[str, Any]:
    case = plain_gpt(layers=1)
    options: Options = {"microbatches": 2, "zero": 3, "precision": precision}
    step = autopar.compile(
        case.model, "pp=2,dp=2", example_inputs=case.batch, **options
    )
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(step(**case.batch).item())
        step.clip_grad_norm_(1.0)
        optimizer.step()
    moments = [x for s in optimizer.state.values() for x in s.values() if x.ndim]
    scale = (step.loss_scale, step.skipped)
    state = step.training_state()
    half = {"loss_scale": {"scale": 4.0, "good": 1, "skipped": 2}}
    step.load_training_state({**state, **half})
    return {
        "losses": losses,
        "dtypes": {str(x.dtype) for x in (*step.parameters(), *moments)},
        "scale": scale,
        "loaded": (step.loss_scale, step.skipped),
        "evaluated": step.evaluate(**case.batch).item(),
    }


def train_both() -> tuple[dict[str, Any], dict[str, Any]]:
    return train("bf16"), train("fp16")


def alone(precision: torch.dtype, steps: int = 4) -> list[float]:
    """The untouched model, trained in the same way on one device."""
    case = plain_gpt(layers=1)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss, grads = reference_step(*case, precision=precision)
        losses.append(loss.item())
        for name, p in case.model.named_parameters():
            p.grad = grads[name]
        nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)
        optimizer.step()
    return losses


@pytest.mark.slow
def test_four_processes_train_in_mixed_precision():
    results = run_ranks(train_both, 4)
    assert all(r == results[0] for r in results)
    low, half = results[0]
    for found, dtype in ((low, torch.bfloat16), (half, torch.float16)):
        assert found["dtypes"] == {"torch.float32"}
        torch.testing.assert_close(found["losses"], alone(dtype), rtol=0.01, atol=0)
        assert found["evaluated"] < found["losses"][-1] < found["losses"][0] - 0.2
    assert low["scale"] == low["loaded"] == (1.0, 0)
    assert (half["scale"], half["loaded"]) == ((2.0**16, 0), (4.0, 2))


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    where, spec = str(tmp_path / "plan"), model_file(tmp_path)
    options = ["--mesh", "dp=2,tp=2", "--zero", "3", "--precision", "bf16", "-o", where]
    assert main(["compile", spec, *options]) == 0
    assert load_plan(where).program.plan.precision == "bf16"
    assert main(["inspect", where]) == 0
    assert "precision bf16" in capsys.readouterr().out
    assert main(["verify", where]) == 0
    text = capsys.readouterr().out
    assert "PASSED" in text and "under autocast" in text
    assert main(["verify", where, "--float64"]) == 0
    captured = capsys.readouterr()
    assert "tolerance 1e-10" in captured.out
    assert "autocast leaves float64 alone" in captured.err


def test_a_wrong_program_fails_in_mixed_precision_too():
    case = plain_gpt(layers=1)
    program = case.compile("tp=2", precision="bf16")
    old, new = "c.reduce_scatter(", "(lambda x, *at: 1.2 * c.reduce_scatter(x, *at))("
    texts = {k: text.replace(old, new) for k, text in program.modules.items()}
    assert texts != program.modules
    found = verify(replace(program, modules=texts), *case)
    assert not found.passed
    with pytest.raises(VerificationFailed, match="more than rounding explains"):
        found.check()


def test_hints_reach_the_copies_of_a_parameter():
    case = plain_gpt(layers=1)
    hints = {"blocks.*.mlp.up.weight": "embed/tp"}
    program = case.compile("dp=2,tp=2", precision="bf16", hints=hints, zero=3)
    spec = program.parameters["blocks.0.mlp.up.weight"]
    assert spec.pattern == "ffn/dp embed/tp"
    verify(program, *case).check()
