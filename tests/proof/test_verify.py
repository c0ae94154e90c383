"""The proof of the whole compiler: every mesh gives the loss and every gradient of the
untouched model, on all ranks in one process."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from cases import Case, run_all_ranks
from models import gpt2, llama, opt, plain_gpt
from torch import nn

from autopar.compiler import compile_offline
from autopar.options import make_plan
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import TIME
from autopar.proof.ranks import (
    VerificationFailed,
    assemble,
    relative_error,
)
from autopar.proof.reference import reference_step
from autopar.proof.verification import Verification
from autopar.verify import verify

MODELS = {"plain": plain_gpt, "gpt2": gpt2, "llama": llama}


def meshes(most: int) -> list[tuple[int, int, int]]:
    """Every (pp, dp, tp) of up to `most` ranks."""
    sizes = itertools.product(range(1, most + 1), repeat=3)
    return [mesh for mesh in sizes if math.prod(mesh) <= most]


def prove(model: str, mesh: str, microbatches: int, **options) -> Verification:
    """Build in float64, compile, run all ranks and compare to 1e-10."""
    of_plan = ("sequence_parallel", "schedule", "zero")
    chosen = {k: options.pop(k) for k in of_plan if k in options}
    case = MODELS[model](**options).double()
    return case.verify(mesh, microbatches, **chosen)


QUICK = [
    ("plain", "tp=1", 1, {}),
    ("plain", "pp=2,dp=2,tp=2", 2, {}),
    ("plain", "tp=2,dp=2", 1, {"dropout": 0.1}),
    ("plain", "pp=8", 4, {"dropout": 0.1}),
    ("plain", "tp=2", 2, {"heads": 3}),
    ("plain", "pp=2,tp=2", 4, {"schedule": "naive"}),
    ("plain", "tp=4", 1, {"seq": 17}),
    ("plain", "tp=2", 1, {"seq": 1}),  # a table with one row
    ("plain", "dp=4", 2, {"ignored": "half"}),
    ("plain", "pp=2,tp=2", 4, {"tied": False, "schedule": "gpipe"}),
    ("plain", "pp=4,tp=2", 2, {"sequence_parallel": False, "ignored": "none"}),
    ("gpt2", "pp=2,dp=2,tp=2", 2, {"padded": True}),
    ("gpt2", "tp=4", 1, {"sequence_parallel": False, "dropout": 0.1}),
    ("gpt2", "dp=2,tp=2", 2, {"dropout": 0.1, "padded": True}),
    ("gpt2", "pp=4", 4, {"schedule": "gpipe"}),
    ("gpt2", "tp=2", 2, {"heads": 3, "padded": True}),
    ("gpt2", "tp=3", 1, {"seq": 17, "tied": False}),
    ("gpt2", "tp=8", 2, {}),
    ("gpt2", "pp=2,tp=2", 4, {"ignored": "half"}),
    ("llama", "pp=2,dp=2,tp=2", 2, {"padded": True}),
    ("llama", "tp=4", 2, {}),
    ("llama", "tp=4", 1, {"kv_heads": 1, "sequence_parallel": False}),
    ("llama", "pp=2,tp=2", 4, {"kv_heads": 1, "tied": True, "schedule": "gpipe"}),
    ("llama", "dp=2,tp=2", 2, {"heads": 6, "kv_heads": 3, "seq": 17}),
    ("llama", "pp=4,dp=2", 4, {"ignored": "half"}),
]


@pytest.mark.matrix(quick=2, daily=8)
@pytest.mark.parametrize(("model", "mesh", "microbatches", "options"), QUICK)
def test_the_program_computes_what_the_model_computes(
    model, mesh, microbatches, options
):
    prove(model, mesh, microbatches, **options)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_rows_that_attend_to_nothing_give_nothing(dropout):
    """Padding on the left: the first queries see no key at all."""
    case = gpt2(layers=2, padded=True, dropout=dropout).double()
    flipped = {name: x.flip(1) for name, x in case.batch.items()}
    case._replace(batch=flipped).verify("pp=2,tp=2", 2)


@pytest.mark.matrix(quick=0, daily=4)
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", meshes(8), ids=lambda m: "pp{}-dp{}-tp{}".format(*m))
def test_every_mesh_of_up_to_8_ranks(model, mesh):
    """With 1 to 4 microbatches; all of the choices take turns."""
    pp, dp, tp = mesh
    microbatches = 1 + (list(MODELS).index(model) + pp + dp + tp) % 4
    turn = (37 * pp + 11 * dp + 5 * tp + 3 * microbatches) % 60
    options = {
        "sequence_parallel": turn % 2 == 0,
        "schedule": ("1f1b", "gpipe", "zb-h1", "zb-h2")[turn // 2 % 4],
        "zero": (turn // 2 + dp) % 4,
        "tied": turn % 3 == 0,
        "seq": (16, 17)[turn // 3 % 2],
        "ignored": ("uneven", "half", "none")[turn // 4 % 3],
        "batch": math.lcm(dp * microbatches, 2),
    }
    if model != "plain":
        options["padded"] = turn // 5 % 2 == 0
    if model != "llama":
        options["dropout"] = 0.1 * (turn // 6 % 2)
    prove(model, f"pp={pp},dp={dp},tp={tp}", microbatches, **options)


DIMS = ["batch", "seq", "heads", "kv_heads", "q_per_kv", "ffn", "vocab", "embed"]


@pytest.mark.matrix(quick=0, daily=7)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_any_preference_of_what_to_split_is_right(seed):
    """Two or three axes that split any dims, often the same: slow plans, but true."""
    draw = random.Random(seed)
    mesh = draw.choice(["cp=2,tp=2", "dp=2,cp=2,tp=2", "dp=3,tp=2", "pp=2,tp=2,cp=2"])
    split = {
        a: tuple(draw.sample(DIMS, draw.randint(1, 5))) for a in ("dp", "cp", "tp")
    }
    split[TIME] = ("batch",)
    model, seq = draw.choice(list(MODELS)), draw.choice([16, 17])
    case = MODELS[model](layers=2, seq=seq, batch=12).double()
    program = case.compile(mesh, draw.choice([1, 2]), split=split)
    # Llama's norms compute in single precision, and sum in another order here.
    tolerance = 1e-6 if model == "llama" else None
    verify(program, *case, tolerance=tolerance).check()


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,dp=2,tp=2"])
def test_in_float32_with_the_models_own_loss(model, mesh):
    case = MODELS[model]()._replace(loss_fn=None)
    case.verify(mesh, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=4", "pp=2,tp=2"])
def test_the_vocab_of_gpt2_splits_unevenly(mesh):
    case = gpt2(layers=1, vocab=50257, batch=2).double()
    program = case.compile(mesh, 2)
    assert "vocab/tp" in program.parameters["transformer.wte.weight"].pattern
    verify(program, *case).check()


@pytest.mark.slow
def test_in_bfloat16_it_is_as_close_to_exact_as_the_model_on_one_device():
    case = gpt2(layers=2)
    case.model.bfloat16()
    program = case.compile("pp=2,dp=2,tp=2", 2)
    _, ours = run_all_ranks(program, case.model, case.batch)
    _, one_device = reference_step(*case)
    _, exact = reference_step(*case.double())
    for name, grad in exact.items():
        least = 1e-3 * grad.numel() ** 0.5
        allowed = 2 * relative_error(one_device[name], grad, least)
        assert relative_error(ours[name], grad, least) < max(allowed, 0.03), name


def with_wrong_text(case: Case, old: str, new: str) -> Verification:
    """Verify a program with one change in each of its modules that has the text."""
    program = case.compile("tp=2")
    changed = {k: text.replace(old, new) for k, text in program.modules.items()}
    assert changed != program.modules
    return verify(replace(program, modules=changed), *case)


def test_a_dropped_collective_is_found():
    case = plain_gpt(layers=1).double()
    old = "c.reduce_scatter("
    found = with_wrong_text(case, old, "(lambda x, *at: 2 * c.reduce_scatter(x, *at))(")
    assert not found.passed
    with pytest.raises(VerificationFailed, match="differs from the untouched model"):
        found.check()


def test_a_dropped_gradient_is_found():
    case = plain_gpt(layers=1).double()
    old = 'kernels.bias_grad_(g["blocks.+0.mlp.up.bias"]'
    found = with_wrong_text(case, old, '(lambda *at: None)(g["blocks.+0.mlp.up.bias"]')
    assert found.worst == ("blocks.0.mlp.up.bias", pytest.approx(1.0))


@pytest.mark.slow
def test_a_gradient_that_is_zero_but_for_rounding_passes():
    """Softmax does not see what a key's bias adds to all scores of a row."""
    case = opt(layers=2)
    verify(case.compile("tp=2"), *case).check()
    found = verify(case.compile("tp=2"), *case, tolerance=0.0)
    assert 0 < found.errors["model.decoder.layers.0.self_attn.k_proj.bias"] < 1e-5


def test_ranks_that_hold_another_gradient_than_their_replicas_are_found():
    program = plain_gpt(layers=1).compile("tp=2")
    one = torch.ones(32, dtype=torch.float64)
    other = one.clone()
    other[3] += 1e-3
    with pytest.raises(VerificationFailed, match="rank 1 has another gradient"):
        assemble(program, "norm.weight", [one, other], noise=1e-2)
    shards = [1e-16 * one, 1e-16 * other]  # rounding, on one rank unlike the other
    assert assemble(program, "norm.weight", shards, noise=1e-2) is not None


class Encoder(nn.Module):
    """torch's own layers: attention that returns its weights, and that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.second = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)

    def forward(self, x):
        return self.second(self.first(x, x, x)[0]).square().sum()


@pytest.mark.slow
def test_dropout_inside_of_torchs_own_layers_is_compared():
    Case(Encoder(), {"x": torch.randn(2, 4, 8)}).double().verify("dp=2")


@pytest.mark.slow
def test_a_model_without_weights_is_proved_by_a_copy_of_it():
    model, batch, _ = plain_gpt(layers=2)
    model, plan = model.to("meta"), make_plan("dp=2,tp=2", microbatches=1)
    program = compile_offline(model, batch, plan)
    with pytest.raises(AutoparError, match="no weights to run with: it is on the meta"):
        verify(program, model, batch)
    assert compile_offline(model, batch, plan, prove=True).proof
