"""Local parameters of models with real weights and of models on the meta device."""

import pytest
import torch
from torch import nn

from autopar.passes.capture.trace import trace
from autopar.passes.mesh import Mesh
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.runtime.parameters.initialize import (
    InitializationError,
    local_state,
    real_tensors,
)
from autopar.runtime.parameters.shards import local_shape
from examples.gpt import GPT, Config

CONFIG = Config(layers=2, width=32, heads=4, context=16, vocab=64)
CPU = torch.device("cpu")


def program(model: nn.Module, mesh: str = "pp=2,tp=2"):
    ids = torch.zeros(4, 16, dtype=torch.int64)
    traced = trace(model, {"ids": ids, "labels": ids.clone()})
    return compile_program(traced, Plan(Mesh.parse(mesh)), PLAIN)


def test_shards_of_real_weights_are_copies_of_their_parts() -> None:
    model = GPT(CONFIG)
    compiled = program(model)
    parameters, _ = local_state(compiled, model, 3, CPU, seed=0)
    # rank 3 of pp=2,tp=2 has the second half of the heads of the last stage
    name = next(n for n in parameters if n.endswith("qkv.weight"))
    whole = dict(model.named_parameters())[name]
    want = whole.view(3, 4, 8, 32)[:, 2:].reshape(48, 32)
    assert torch.equal(parameters[name], want)
    assert parameters[name].untyped_storage().nbytes() == want.nbytes


def test_a_model_on_meta_is_initialised_by_its_own_initialisers() -> None:
    with torch.device("meta"):
        model = GPT(CONFIG)
    compiled = program(model)
    ranks = [local_state(compiled, model, rank, CPU, seed=5)[0] for rank in range(4)]
    for rank, parameters in enumerate(ranks):
        for name, p in parameters.items():
            spec = compiled.parameters[name]
            coords = compiled.mesh.coords(rank)
            assert tuple(p.shape) == local_shape(spec, compiled.mesh, coords)
            assert p.isfinite().all(), name
    norms = [p for n, p in ranks[0].items() if "norm" in n and n.endswith("weight")]
    assert norms
    assert all((p == 1).all() for p in norms)
    tokens = next(p for n, p in ranks[0].items() if n.startswith("tokens"))
    assert 0.015 < tokens.std() < 0.025  # the model's own normal(0, 0.02)


def test_ranks_draw_the_same_weights_and_leave_the_generator_alone() -> None:
    with torch.device("meta"):
        model = GPT(CONFIG)
    before = torch.random.get_rng_state()
    first, second = (dict(real_tensors(model, seed=7)) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[n], second[n]) for n in first)
    other = dict(real_tensors(model, seed=8))
    assert not all(torch.equal(first[n], other[n]) for n in first)


class Bare(nn.Module):
    """Holds a parameter that nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.scale = nn.Parameter(torch.empty(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.table(ids) * self.scale).sum()


def test_a_module_that_cannot_initialise_itself_is_named() -> None:
    with torch.device("meta"):
        model = Bare()
    ids = torch.zeros(2, 3, dtype=torch.int64)
    compiled = compile_program(
        trace(model, {"ids": ids}), Plan(Mesh.parse("pp=1")), PLAIN
    )
    with pytest.raises(InitializationError, match=r"scale.*Bare cannot initialise"):
        local_state(compiled, model, 0, CPU, seed=0)
