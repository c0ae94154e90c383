"""Models as they are published are proved at their own size, on what people run."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.models.configurations import shipped
from autopar.models.load import example_batch, load_model
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.proof.prove_program import SMALL

PLANS = [
    ("dp=2,pp=2,tp=4", {"zero": 1}),
    ("dp=4,tp=2", {"zero": 3}),
    ("pp=4,tp=2", {"schedule": "interleaved", "stages_per_rank": 2}),
]


@pytest.mark.slow
@pytest.mark.matrix(quick=0, daily=3)
@pytest.mark.parametrize(("mesh", "options"), PLANS, ids=[mesh for mesh, _ in PLANS])
@pytest.mark.parametrize("name", sorted(shipped()))
def test_a_model_is_proved_at_its_own_size(name: str, mesh: str, options: dict) -> None:
    pytest.importorskip("transformers")
    loaded = load_model(f"hf:{name}", device="meta")
    batch = example_batch(loaded.vocab or 0, 64, 1024)
    plan = Plan(Mesh.parse(mesh), 8, **options)
    program = autopar.compile_offline(
        loaded.model, batch, plan, cluster=PLAIN, prove=True
    )
    proof = program.proof
    assert proof is not None and proof.size == SMALL and proof.passed


# Of transformers' causal models, at their default sizes: windows and rotations in turn,
# chosen groups of experts, gates as wide as the model, state spaces, heads that are
# longer than they are many, what is looked up for all layers at first.
KINDS = [
    "bamba",
    "cohere2",
    "exaone4",
    "gemma4_text",
    "glm4_moe",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "nemotron_h",
    "olmo3",
]


@pytest.mark.slow
@pytest.mark.matrix(quick=0, daily=1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_proved_at_its_default_size(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = transformers.AutoConfig.for_model(kind, use_cache=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    batch = example_batch(config.vocab_size, 64, 1024)
    plan = Plan(Mesh.parse("dp=2,pp=2,tp=4"), 8, zero=1)
    program = autopar.compile_offline(model, batch, plan, cluster=PLAIN, prove=True)
    proof = program.proof
    assert proof is not None and proof.size == SMALL and proof.passed
