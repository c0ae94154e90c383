"""Prices change as sizes do: in the right direction, without jumps, whatever the model.

Nothing is measured here: the table says what an H100 and its links do.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import isfinite

import pytest
import torch

from autopar.machine.hardware import cluster_of
from autopar.models.load import load_model
from autopar.passes.mesh import Mesh
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.estimate import Estimate
from autopar.passes.price.price_layers import Prices
from autopar.passes.search.search import run_on_paper
from autopar.planner.planner import capture_short, make_prices
from examples.gpt import GPT, Config

LAYERS, EMBED, TABLE = 8, 1024, cluster_of("8xH100")


@cache
def gpt(
    seq: int = 1024, samples: int = 4, vocab: int = 4096, embed: int = EMBED
) -> Prices:
    with torch.device("meta"):
        model = GPT(Config(LAYERS, embed, 16, seq, vocab)).bfloat16()
    ids = torch.zeros(samples, seq, dtype=torch.int64)
    return make_prices(capture_short(model, {"ids": ids, "labels": ids.clone()}), TABLE)


def hugging_face(family: str, **odd: object) -> Prices:
    sizes = {"hidden_size": EMBED, "num_attention_heads": 16, "vocab_size": 4096}
    sizes |= {"num_hidden_layers": LAYERS, "intermediate_size": 4 * EMBED}
    text = ",".join(f"{name}={size}" for name, size in {**sizes, **odd}.items())
    model = load_model(f"hf:{family}?{text}", device="meta").model.bfloat16()
    ids = torch.zeros(4, 512, dtype=torch.int64)
    return make_prices(
        capture_short(model, {"input_ids": ids, "labels": ids.clone()}), TABLE
    )


def candidate(mesh: str, samples: int = 2, microbatches: int = 4) -> Candidate:
    where = Mesh.parse(mesh)
    stages = where.axis_size("pp")
    layers = (LAYERS // stages,) * stages
    return Candidate(where, samples, microbatches, "1f1b", 1, 0, "none", layers)


def on(chosen: Candidate) -> Cluster:
    return cluster_of(f"{chosen.mesh.size}xH100")


def estimated(prices: Prices, chosen: Candidate) -> Estimate:
    return run_on_paper(chosen, prices, on(chosen))


def check(found: Estimate) -> None:
    """Numbers that a run could have."""
    cluster = on(found.candidate)
    assert isfinite(found.seconds)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert min(found.parts.values()) > -1e-9 * found.seconds
    assert 0 < found.utilisation(cluster) < cluster.device.efficiency
    assert 0 <= found.bubble < 1
    assert all(size >= 0 for terms in found.memory for size in terms.values())
    assert found.peak > 0


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("vary", ["samples", "microbatches"])
def test_more_samples_take_longer_but_less_each(vary: str) -> None:
    runs = [replace(candidate("pp=2,tp=2"), **{vary: n}) for n in (2, 4, 8, 16, 32)]
    for less, more in pairwise(estimated(gpt(), run).seconds for run in runs):
        assert less < more <= 2 * less


@pytest.mark.slow
def test_more_ranks_compute_less_but_not_as_much_less() -> None:
    parts = [estimated(gpt(), candidate(f"tp={n}")) for n in (2, 4, 8, 16)]
    for less, more in pairwise(parts):
        computing = less.parts["compute"], more.parts["compute"]
        assert computing[0] > computing[1] >= computing[0] / 2
        # Norms and dropouts that all ranks compute alike count once for each.
        assert less.flops <= more.flops < 1.1 * less.flops
    inside, between = parts[-2:]
    assert between.communication > 2 * inside.communication


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_of_more_ranks_take_longer_without_a_jump(zero: int) -> None:
    ranks = (16, 32, 64, 128, 256, 512, 1024)
    runs = [replace(candidate(f"dp={n}"), zero=zero) for n in ranks]
    took = [estimated(gpt(), run) for run in runs]
    for before, after in pairwise(took):
        # Each has less of the optimizer to do.
        own = before.parts["optimizer"] - after.parts["optimizer"]
        assert before.seconds - own < after.seconds < 3 * before.seconds
    for found in took:
        check(found)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"vocab": 262144}, {"embed": 64}], ids=str)
def test_odd_sizes_have_prices_that_add_up(sizes: dict[str, int]) -> None:
    for chosen in (candidate("tp=2", 1, 1), candidate("pp=2,dp=4,tp=2", 1)):
        check(estimated(gpt(512, **sizes), replace(chosen, zero=1)))


@pytest.mark.slow
def test_long_sequences_have_prices_that_add_up() -> None:
    """Of 131072 tokens most products are attention's (Narayanan 2021, equation 3)."""
    short, long = (estimated(gpt(n, 1), candidate("tp=2", 1)) for n in (1024, 131072))
    check(long)
    of_attention = [2 * tokens * EMBED for tokens in (1024, 131072)]
    of_head = 2 * 4096 * EMBED / (2 * LAYERS)
    before, after = (12 * EMBED**2 + x + of_head for x in of_attention)
    assert long.flops / short.flops == pytest.approx(128 * after / before, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "odd"),
    [
        ("llama", {"num_key_value_heads": 1}),
        ("mixtral", {"num_local_experts": 8, "experts_implementation": "batched_mm"}),
    ],
)
def test_odd_layers_have_prices_that_add_up(
    family: str, odd: dict[str, object]
) -> None:
    prices = hugging_face(family, **odd)
    for chosen in (candidate("tp=2", 1), candidate("pp=2,dp=4,tp=2", 1)):
        check(estimated(prices, replace(chosen, zero=1)))
