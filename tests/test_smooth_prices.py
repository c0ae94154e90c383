"""Prices change as sizes do: in the right direction, without jumps, whatever the model.

What is priced here is never measured: the table of an H100 and its links.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import isfinite

import pytest
import torch

from autopar.machine.hardware import cluster_of
from autopar.models import load_model
from autopar.planner.planner import Sketch, make_prices, sketch
from passes.mesh import Mesh
from passes.price.candidate import Candidate
from passes.price.cluster import Cluster
from passes.price.estimate import Estimate
from passes.price.price_layers import Prices
from passes.search.search import run_on_paper

LAYERS = 8
USUAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}


@cache
def model(seq: int, samples: int, family: str = "llama", **odd: int) -> Sketch:
    sizes = {**USUAL, "num_key_value_heads": 16, "vocab_size": 4096, **odd}
    sizes |= {"num_hidden_layers": LAYERS, "max_position_embeddings": seq}
    text = ",".join(f"{name}={size}" for name, size in sizes.items())
    text += ",experts_implementation=batched_mm" if family == "mixtral" else ""
    module = load_model(f"hf:{family}?{text}", device="meta").model.bfloat16()
    ids = torch.zeros(samples, seq, dtype=torch.int64)
    return sketch(module, {"input_ids": ids, "labels": ids.clone()})


def candidate(mesh: str, samples: int = 2, microbatches: int = 4) -> Candidate:
    where = Mesh.parse(mesh)
    stages = where.axis_size("pp")
    layers = (LAYERS // stages,) * stages
    return Candidate(where, samples, microbatches, "1f1b", 1, 0, "none", layers)


@cache
def prices(of: Sketch) -> Prices:
    return make_prices(of, cluster_of("8xH100"))


def estimated(of: Sketch, chosen: Candidate) -> Estimate:
    return run_on_paper(chosen, prices(of), on(chosen))


def on(chosen: Candidate) -> Cluster:
    return cluster_of(f"{chosen.mesh.size}xH100")


def test_more_samples_take_longer_but_less_each() -> None:
    of = model(1024, 4)
    for vary in ("samples", "microbatches"):
        runs = [replace(candidate("pp=2,tp=2"), **{vary: n}) for n in (2, 4, 8, 16, 32)]
        for (less, fewer), (more, longer) in pairwise(
            (run, estimated(of, run).seconds) for run in runs
        ):
            assert fewer < longer <= 2 * fewer, (less, more)


def test_more_ranks_compute_less_but_never_as_much_less() -> None:
    of = model(1024, 4)
    parts = [estimated(of, candidate(f"tp={n}")) for n in (2, 4, 8, 16)]
    for less, more in pairwise(parts):
        computing = less.parts["compute"], more.parts["compute"]
        assert computing[0] > computing[1] >= computing[0] / 2
        assert more.communication > 0
        assert more.flops == pytest.approx(less.flops)
    # Between nodes the same bytes take longer.
    assert parts[-1].communication > 2 * parts[-2].communication


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_of_more_ranks_take_longer_without_a_jump(zero: int) -> None:
    of = model(1024, 4)
    ranks = (16, 32, 64, 128, 256, 512, 1024)
    took = [
        estimated(of, replace(candidate(f"dp={n}"), zero=zero)).seconds for n in ranks
    ]
    for before, after in pairwise(took):
        assert before * 0.999 <= after < 3 * before, took


ODD: dict[str, dict[str, int]] = {
    "one key and value for all heads": {"num_key_value_heads": 1},
    "a vocabulary of 262144": {"vocab_size": 262144},
    "narrow": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    | {"num_key_value_heads": 4},
    "experts": {"num_local_experts": 8},
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_odd_models_have_prices_that_add_up(odd: dict[str, int]) -> None:
    of = model(512, 4, "mixtral" if "num_local_experts" in odd else "llama", **odd)
    for chosen in (candidate("tp=2", 1), candidate("pp=2,dp=4,tp=2", 1)):
        check(estimated(of, replace(chosen, zero=1)), on(chosen))


def test_long_sequences_have_prices_that_add_up() -> None:
    """131072 tokens: attention's products are most of the work, as the formulas say."""
    short, long = (estimated(model(n, 1), candidate("tp=2", 1)) for n in (1024, 131072))
    check(long, on(long.candidate))
    each = 12 * USUAL["hidden_size"] ** 2  # of a layer's weights, 16 in Llama's shape
    grown = (16 / 12 * each + 2 * 131072 * 1024) / (16 / 12 * each + 2 * 1024 * 1024)
    assert long.flops / short.flops / 128 == pytest.approx(grown, rel=0.2)


def check(found: Estimate, cluster: Cluster) -> None:
    assert isfinite(found.seconds)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert all(took > -1e-9 * found.seconds for took in found.parts.values())
    assert 0 < found.utilisation(cluster) < cluster.device.efficiency
    assert 0 <= found.bubble < 1
    assert all(size >= 0 for terms in found.memory for size in terms.values())
    assert found.peak > 0
