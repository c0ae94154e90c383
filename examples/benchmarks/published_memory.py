"""Seconds and peak bytes of pipelines on A100s, predicted: Megatron-LM's 1F1B and zero
bubble's schedules (Qi 2023, arXiv:2401.10241, table 4), which nothing is fitted to.

Activations are as wide as those of a 16-bit model, parameters, their gradients and
moments have 32 bits, and attention is spelled out, with dropout. The first and the last
stage have a layer less. Interleaved stages are left out: two of them have no layer.

The paper does not state the vocabulary. The authors' script (`pretrain_zero_bubble.sh`
of sail-sg/zero-bubble-pipeline-parallelism, 2023) reads a SentencePiece model, which
others who ran it give 32,004 tokens; Megatron-LM pads them to a multiple of 128.
"""

from __future__ import annotations

from functools import cache

from autopar.machine.hardware import cluster_of
from autopar.passes.mesh import Mesh
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.estimate import Estimate
from autopar.passes.price.price_layers import Prices
from autopar.passes.search.search import run_on_paper
from autopar.planner.planner import make_prices
from examples.benchmarks.published_models import Row, gpt, read

SCHEDULES = {"1F1B": "1f1b", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2"}
VOCAB = 32128
FILLED = 24  # microbatches: more are in no more memory


@cache
def pipeline_runs() -> tuple[tuple[Row, Estimate], ...]:
    """Published runs of as many stages as ranks, and what is predicted of them."""
    rows = (row for row in read("zero_bubble") if row["samples_per_second"])
    ours = (row for row in rows if row["schedule"] in SCHEDULES)
    return tuple((row, _predicted(row)) for row in ours)


def memory_runs() -> list[tuple[Row, Estimate]]:
    """One run of each schedule."""
    return [run for run in pipeline_runs() if int(run[0]["microbatches"]) == FILLED]


def published_seconds(row: Row) -> float:
    """Seconds of a step, from the samples that each device does in one."""
    samples = int(row["samples"]) * int(row["microbatches"])
    return samples / (float(row["samples_per_second"]) * int(row["ranks"]))


def _predicted(row: Row) -> Estimate:
    names = ("width", "heads", "layers", "seq", "ranks", "samples", "microbatches")
    width, heads, layers, seq, ranks, samples, count = (int(row[n]) for n in names)
    prices = _prices(width, heads, layers, seq)
    each, ends = divmod(layers + 2, ranks)
    assert ends == 0, "all stages but the ends are alike"
    cuts = (each - 1, *[each] * (ranks - 2), each - 1)
    kind = SCHEDULES[row["schedule"]]
    mesh = Mesh((("pp", ranks),))
    candidate = Candidate(mesh, samples, count, kind, 1, 0, "none", cuts)
    return run_on_paper(candidate, prices, cluster_of(f"{ranks}xA100-80GB"))


@cache
def _prices(width: int, heads: int, layers: int, seq: int) -> Prices:
    of = gpt(width, heads, layers, VOCAB, seq, precision="bf16-stream")
    return make_prices(of, cluster_of("1xA100-80GB"))
