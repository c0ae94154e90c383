"""Seconds of runs that share all parameters out (ZeRO-3) over up to 2,240 A100s, with
the constants of `published_runs` and the table's seconds for a ring's step.

FSDP (Zhao 2023, arXiv:2304.11277) gathers a block while another computes, as our own
plans do. Of DeepSpeed as it was run for table 2 of Narayanan 2021 (arXiv:2104.04473) it
is assumed, with its rows in view, that it gathered each weight by itself, and that a
rank waited for it. Both compute layers again in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from autopar.passes.mesh import Mesh
from autopar.passes.price.account import Account
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.estimate import step_seconds
from autopar.passes.price.price import retimed
from autopar.passes.price.price_layers import Way
from autopar.passes.price.stage_seconds import stage_seconds
from autopar.passes.search.by_formula import layer_mesh
from autopar.passes.search.recompute_whole import layer_again
from autopar.passes.search.search import accounts_of
from autopar.planner.planner import make_prices
from examples.benchmarks.published_models import Row, gpt, read
from examples.benchmarks.published_rows import on_network
from examples.benchmarks.published_runs import UNFITTED, Constants

SEQ = 2048
WEIGHTS = 4  # of a layer, that are large enough to be shared out


@dataclass(frozen=True)
class ZeroRun:
    """A published run. blocks: whether what is gathered at once is all of a layer, and
    comes while another one computes."""

    source: str
    name: str
    seconds: float
    blocks: bool
    candidate: Candidate
    cluster: Cluster
    account: Account

    def predict(self, constants: Constants) -> float:
        """Seconds of an iteration."""
        cluster = constants.of(self.cluster)
        account = retimed(self.account, cluster.device)
        if self.blocks:
            return step_seconds([account], self.candidate, cluster)
        alone = stage_seconds(account, self.candidate.mesh, cluster)
        link = cluster.link(self.candidate.mesh, ("dp",))
        calls = WEIGHTS * self.candidate.layers[0]
        each = account.held.read / calls
        gathers = 2 * link.seconds("all_gather", each)
        moving = calls * (gathers + link.seconds("reduce_scatter", each))
        return alone.forward + alone.backward + alone.weight + moving


@cache
def zero_runs() -> tuple[ZeroRun, ...]:
    return tuple(map(_run, read("zero_runs")))


def _run(row: Row) -> ZeroRun:
    names = ("layers", "hidden", "heads", "vocab", "gpus", "mbs")
    layers, hidden, heads, vocab, gpus, samples = (int(row[name]) for name in names)
    network = on_network(f"{gpus}xA100-80GB", float(row["network_gb"]))
    cluster = UNFITTED.of(network)
    mesh = Mesh((("dp", gpus),))
    candidate = Candidate(mesh, samples, 1, "1f1b", 1, 3, "none", (layers,))
    prices = make_prices(gpt(hidden, heads, layers, vocab), cluster)
    layer = prices(Way(layer_mesh(mesh), "none", False, samples, True))
    (account,) = accounts_of(candidate, prices)
    account = account + layer_again(layer) * layers
    return ZeroRun(
        row["source"],
        row["model"],
        flops(layers, hidden, vocab, samples) / float(row["tflops_gpu"]) / 1e12,
        row["system"] == "FSDP",
        candidate,
        cluster,
        account,
    )


def flops(layers: int, hidden: int, vocab: int, samples: int) -> float:
    """Counts operations by equation 3 of arXiv:2104.04473: layers computed twice."""
    beside = SEQ / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96.0 * samples * SEQ * layers * hidden**2 * (1 + beside)
