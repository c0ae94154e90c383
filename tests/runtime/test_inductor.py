"""Functions that Inductor compiled: the same loss and gradients, compiled once."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import pytest
import torch
from draws import Model

import autopar
from autopar.examples.gpt import Config, build
from autopar.machine.backend import BackendError, resolve_backend
from autopar.options import make_plan
from autopar.passes.plan import PlanError
from autopar.passes.price.cluster import PLAIN
from autopar.runtime import kernels
from autopar.runtime.execute import code_cache, inductor
from autopar.runtime.execute.code_cache import CodeCache
from autopar.runtime.execute.inductor import CompiledFunction, compile_functions
from autopar.runtime.execute.running_stage import load_module
from autopar.runtime.kernels import for_inductor
from autopar.verify import verify
from examples.benchmarks.compiled_layer import MODELS, measure

CHANCES = (0.0, 0.1, 0.5, 0.999, 1.0)
CPU = torch.device("cpu")
TEXT = """
def double(x, y):
    z = x.add_(y)  # [rows]  model.py:7  block
    return z


def strange(x):
    if bool(x.any()):  # model.py:9
        x = x + 1
    return x
"""


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """Where all tests keep what they compile."""
    # Code without vector instructions is compiled sooner, by a third.
    config = import_module("torch._inductor.config")
    config.cpp.vec_isa_ok, config.cpp.simdlen = True, 1
    return tmp_path_factory.mktemp("compiled")


def _functions(folder):
    module = load_module(TEXT, "emitted")
    compile_functions(module, TEXT, CodeCache(folder))
    return module


def test_an_unknown_backend_is_an_error_with_the_choices():
    with pytest.raises(PlanError, match="backend='tvm'") as error:
        autopar.Plan(autopar.Mesh.parse(""), backend="tvm")
    assert "'eager', 'inductor', 'auto'" in str(error.value)


def test_a_backend_without_a_compiler_is_an_error_if_asked_for_by_name(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendError, match="C\\+\\+ compiler no-such-compiler"):
        resolve_backend("inductor", CPU)
    assert resolve_backend("auto", CPU) == ("eager", "")
    monkeypatch.setattr("autopar.machine.backend.find_spec", lambda name: None)
    backend, note = resolve_backend("auto", torch.device("cuda"))
    assert backend == "eager"
    assert "triton is not installed" in note


@pytest.mark.slow
def test_a_function_that_inductor_refuses_runs_as_it_is_written(tmp_path, caplog):
    strange = _functions(tmp_path)["strange"]
    for _ in range(2):
        assert strange(torch.ones(2)).tolist() == [2.0, 2.0]
    (line,) = strange.cache.refused
    assert line in caplog.text
    assert "refuses strange (model.py:9), which runs as it is written" in line


def test_arguments_that_share_memory_are_not_written_by_compiled_code(tmp_path):
    """A kernel might read what another one has written over."""
    double = _functions(tmp_path)["double"]  # of rows that are views of one tensor
    base = torch.ones(2, 2)
    _, _, written, _ = double.traced((base[0], base[1]))
    assert written == [0]
    signature = inductor._signature((base[0], base[1]))
    code = code_cache.Compiled(lambda *args: pytest.fail("compiled code wrote"), (0,))
    double.ready[signature] = code
    assert double(base[0], base[1]).tolist() == [2.0, 2.0]
    assert "double (model.py:7) writes over an argument" in double.cache.refused[0]
    with pytest.raises(pytest.fail.Exception):
        double(base[0], torch.ones(2))


def test_plain_kernels_compute_what_the_kernels_do():
    x, m = torch.randn(3, 5, dtype=torch.bfloat16), torch.randn(3)
    calls = {
        "sum_exp": (x, m),
        "sum_exp_backward": (x, torch.randn(3), m),
        "sum_exp_backward_": (x, torch.randn(3), m),
        "bias_grad_": (torch.zeros(5), torch.randn(2, 3, 5)),
    }
    for name, args in calls.items():
        plain, blocked = (
            getattr(k, name)(*[a.clone() for a in args])
            for k in (for_inductor, kernels)
        )
        torch.testing.assert_close(plain, blocked)
        assert plain.dtype is blocked.dtype


@pytest.mark.slow
def test_a_compiled_mask_keeps_the_same_elements(kept):
    """Products of its mixer wrap, which compiled C++ need not let them do."""
    text = "def masks(x, rows, cols):\n    " + "\n    ".join(
        f"kept_{i} = kernels.kept(rows, cols, {p})" for i, p in enumerate(CHANCES)
    )
    names = ", ".join(f"kept_{i}" for i in range(len(CHANCES)))
    text = f"from autopar.runtime import kernels\n{text}\n"
    text += f"    return {names}, kernels.masked_scale(x, kept_0, 2.0)\n"
    module = load_module(text, "emitted")
    cache, x = CodeCache(kept), torch.ones(3, 17)
    compile_functions(module, text, cache)
    far = [[(2**40, ((2**40 - 3, 3),))], [(64, ((8, 9), (40, 8)))]]
    for key, op in ((0, 0), (-41, 7), (2**63, 2**31)):
        rows, cols = kernels.counters(key, op, far, CPU)
        *masks, _ = module["masks"](x, rows, cols)
        for p, mask in zip(CHANCES, masks, strict=True):
            assert torch.equal(mask, kernels.kept(rows, cols, p))
    assert cache.taken
    *masks, alone = module["masks"](x, None, None)  # while evaluating
    assert torch.equal(alone, x) and masks == [None] * len(CHANCES)
    assert not cache.refused


@pytest.mark.slow
def test_one_function_of_many_calls_is_compiled_once_and_found_again(kept, caplog):
    caplog.set_level(logging.WARNING, "autopar")
    double, x = _functions(kept)["double"], torch.ones(3)
    assert double(x, torch.ones(3)) is not None
    assert x.tolist() == [2.0, 2.0, 2.0]
    assert double(x, x.clone()).tolist() == [4.0, 4.0, 4.0]
    assert isinstance(double, CompiledFunction)
    assert len([r for r in caplog.records if "compiles" in r.message]) == 1
    code_cache._in_memory.clear()
    caplog.clear()
    assert _functions(kept)["double"](torch.ones(3), torch.ones(3)).sum() == 6
    assert not caplog.records


def test_compiled_code_of_another_version_is_made_again_and_said(tmp_path, caplog):
    _functions(tmp_path)["strange"](torch.ones(2))
    (tmp_path / "versions.json").write_text('{"torch": "1.0"}')
    (tmp_path / "left").touch()
    _functions(tmp_path)["strange"](torch.ones(2))
    (line,) = [r.message for r in caplog.records if "is of" in r.message]
    assert "torch 1.0, " in line
    assert f"this is autopar {autopar.__version__}, torch {torch.__version__}" in line
    assert not (tmp_path / "left").exists()


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_model(kept):
    model, batch = build(Config(layers=2, width=32, heads=2, context=16, vocab=64), 4)
    plan = autopar.Plan(autopar.Mesh.parse("pp=1"), 2, backend="inductor")
    program = autopar.compile_offline(model, batch, plan)
    compiled = CodeCache(kept)
    proof = verify(program, model, batch, compiled=compiled).check()
    assert compiled.compiled
    assert not compiled.refused
    assert verify(program, model, batch).check().worst != proof.worst


TECHNIQUES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "tp-dropout": ("plain_gpt", {"dropout": 0.2}, "tp=2", {}),
    "without-sp": ("plain_gpt", {}, "tp=2", {"sequence_parallel": False}),
    "1f1b": ("plain_gpt", {}, "pp=2", {"microbatches": 2}),
    "interleaved": (
        "plain_gpt",
        {},
        "pp=2",
        {"schedule": "interleaved", "stages_per_rank": 2, "microbatches": 2},
    ),
    "zero-bubble": ("plain_gpt", {}, "pp=2", {"schedule": "zb-h1", "microbatches": 2}),
    "zero-3": ("plain_gpt", {}, "dp=2", {"zero": 3}),
    "ring": ("gpt2", {"padded": True}, "cp=2", {"context_parallel": "ring"}),
    "experts": ("switch_gpt", {"top_k": 2}, "ep=2", {}),
    "recompute": ("plain_gpt", {"dropout": 0.2}, "", {"recompute": "full"}),
    "bf16": ("plain_gpt", {}, "tp=2", {"precision": "bf16"}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TECHNIQUES)
def test_each_technique_is_exact_with_compiled_functions(kept, name):
    kind, sizes, mesh, options = TECHNIQUES[name]
    case = Model(kind, tuple({"layers": 2, **sizes}.items()), 0.0).build()
    if name == "bf16":  # autocast leaves float64 as it is
        case.model.float()
    plan = make_plan(mesh, **options)
    program = autopar.compile_offline(
        case.model, case.batch, plan, case.loss_fn, cluster=PLAIN
    )
    compiled = CodeCache(kept)
    verify(program, case.model, case.batch, case.loss_fn, compiled=compiled).check()
    assert not compiled.refused
    assert compiled.taken, "here or for another technique"


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # a machine that does other things as well
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_takes_no_more_kernels_and_bytes_than_by_torch_compile(model: str):
    ours, _, theirs = measure(MODELS[model](256, 128, 4))
    assert ours.kernels <= theirs.kernels
    assert ours.bytes <= 1.02 * theirs.bytes
