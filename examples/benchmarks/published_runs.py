"""Seconds of runs, predicted.

Three constants of the hardware are fitted to Megatron-LM's runs of 2021 without a
pipeline (`sc21_table1.csv`, up to 18B parameters) and to one layer of a 22B model; all
others are predicted with them. `others.csv` was in view while the models of what each
system does were settled; `held_out.csv` was looked up after that.

Megatron-LM of 2021 split no sequences, fused elementwise ops, reduced gradients after
the backward, ran all of a layer again where it was recomputed, and sent a share of what
tensor parallel ranks hold alike to the next stage, to be gathered inside of the node
(Narayanan 2021, arXiv:2104.04473, section 4.1). That of Korthikanti 2022
(arXiv:2205.05198) and later runs collectives of the backward beside it, and with
sequence parallelism sends each rank's own share to the next stage; Megatron-DeepSpeed
(Smith 2022, arXiv:2201.11990; Le Scao 2022, arXiv:2211.05100) has neither, nor
interleaved stages, and sends all that a rank holds; FSDP (llm-foundry) gathers a block
while another computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from autopar.machine.hardware import cluster_of
from autopar.passes.mesh import Mesh
from autopar.passes.price.account import Account, PartCost
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.estimate import OPTIMIZER_TRAFFIC, step_seconds
from autopar.passes.price.price import retimed
from autopar.passes.price.price_layers import Way
from autopar.passes.price.stage_seconds import stage_seconds
from autopar.passes.search.by_formula import prices_of
from autopar.passes.search.recompute_whole import layer_again
from autopar.passes.search.search import accounts_of
from autopar.passes.stage.blocks import BlockMessages
from autopar.planner.planner import make_prices
from examples.benchmarks.published_fit import descend
from examples.benchmarks.published_models import Row, gpt, in_turn, read
from examples.benchmarks.published_rows import (
    candidate_of,
    on_network,
    rows_of_runs,
    sizes_of,
)

FITTED_UP_TO = 20  # billions of parameters


@dataclass(frozen=True)
class Constants:
    """What is fitted: shares of the peak that products, copies, and collectives in a
    node reach."""

    products: float
    copies: float
    links: float

    def of(self, cluster: Cluster) -> Cluster:
        device = replace(
            cluster.device,
            efficiency=self.products,
            bandwidth_efficiency=self.copies,
            fused=True,
        )
        inside, *network = cluster.levels
        inside = replace(inside, efficiency=self.links)
        return replace(cluster, device=device, levels=(inside, *network))


@dataclass(frozen=True)
class Run:
    """A published run, and where it is published. accounts: of its stages, before
    constants are known."""

    source: str
    name: str
    seconds: float
    candidate: Candidate
    cluster: Cluster
    accounts: tuple[Account, ...]

    def predict(self, constants: Constants) -> float:
        """Seconds of an iteration."""
        return self._seconds(constants.of(self.cluster))

    def by_the_table(self) -> float:
        """The same with nothing fitted to these runs, by the table of hardware and on
        the network that they had; in this file's sum of parts, which is not the price
        that `autopar plan` gives."""
        table, network = cluster_of(str(self.cluster)), self.cluster.levels[1:]
        return self._seconds(replace(table, levels=(table.levels[0], *network)))

    def _seconds(self, cluster: Cluster) -> float:
        accounts = [retimed(a, cluster.device) for a in self.accounts]
        return step_seconds(accounts, self.candidate, cluster)


@cache
def runs(table: str, source: str = "") -> tuple[Run, ...]:
    """The runs of a table, of sources whose names begin so."""
    rows = (row for row in rows_of_runs(table) if row["source"].startswith(source))
    return tuple(map(_run, rows))


def _run(row: Row) -> Run:
    candidate, cluster = candidate_of(row), _cluster(row)
    of = gpt(*sizes_of(row), attention=row["attention"])
    sequence_parallel, megatron = row["sp"] == "1", "Megatron-LM" in row["system"]
    prices = make_prices(of, cluster, sequence_parallel=sequence_parallel)
    policy = candidate.recompute if row["recompute"] == "selective" else "none"
    candidate = replace(candidate, recompute=policy)
    accounts = accounts_of(candidate, prices)
    if row["system"] == "Megatron-LM":
        accounts = [overlapped(account) for account in accounts]
    if row["recompute"] == "full":
        again = layer_again(prices_of(candidate, prices))
        accounts = [
            account + again * layers
            for account, layers in zip(accounts, candidate.layers, strict=True)
        ]
    shared = int(row["tp"]) if megatron and not sequence_parallel else 1
    accounts = [a + in_float32(a) for a in in_turn(accounts, shared)]
    if row["system"] == "DeepSpeed":
        accounts = [a + of_bfloat16(a) for a in accounts]
    seconds = float(row["iter_time_s"])
    return Run(
        row["source"], row["model"], seconds, candidate, cluster, tuple(accounts)
    )


def _cluster(row: Row) -> Cluster:
    """llm-foundry's attention was a Triton kernel of 2023, not that of the table."""
    named = f"{row['gpus']}x{row['device']}"
    cluster = UNFITTED.of(on_network(named, float(row["network_gb"])))
    return replace(cluster, device=replace(cluster.device, attention=""))


def in_float32(account: Account) -> Account:
    """What Megatron's optimizer moves beside what `passes.price.estimate` counts:
    gradients are copied to 4 bytes (6 bytes moved), unscaled (8) and clipped (12), Adam
    works on 4 bytes (28), and parameters are copied back (6)."""
    counted = OPTIMIZER_TRAFFIC * account.held.trained
    moved = (6 + 8 + 12 + 28 + 6) * account.held.trained / 2
    return Account(step=PartCost(moved=moved - counted))


def of_bfloat16(account: Account) -> Account:
    """What DeepSpeed's pipelines move beside others' where products are in bfloat16:
    each microbatch's gradients are written (2 bytes of a parameter), read, and added to
    ones of 4 bytes (10), where others add to those of 2 (4); and these are all-reduced,
    with ZeRO's first stage too (`_bf16_reduce_grads` of `deepspeed.runtime.pipe`)."""
    backward, weight = (
        replace(PartCost(), scattered=BlockMessages(bytes=3 * part.scattered.bytes))
        for part in (account.backward, account.weight)  # an all-reduce is two of these
    )
    backward = replace(backward, moved=8 * account.held.trained / 2)
    return Account(backward=backward, weight=weight, pending=account.pending)


@dataclass(frozen=True)
class LayerRun:
    """A layer of table 4 of arXiv 2205.05198: seconds forward and backward."""

    name: str
    forward: float
    backward: float
    candidate: Candidate
    account: Account

    def predict(self, constants: Constants) -> tuple[float, float]:
        cluster = constants.of(cluster_of("8xA100-80GB"))
        account = retimed(self.account, cluster.device)
        took = stage_seconds(account, self.candidate.mesh, cluster)
        return took.forward, took.backward + took.weight


@cache
def layer_runs() -> tuple[LayerRun, ...]:
    timed = []
    for row in read("korthikanti_table4"):
        mesh = Mesh.parse(f"tp={row['tp']}")
        samples, policy = int(row["mbs"]), row["recompute"]
        candidate = Candidate(mesh, samples, 1, "1f1b", 1, 0, policy, (1,))
        prices = make_prices(
            gpt(int(row["hidden"]), int(row["heads"])),
            UNFITTED.of(cluster_of("8xA100-80GB")),
            sequence_parallel=row["sp"] == "1",
        )
        full = policy == "full"
        layer_prices = prices(Way(mesh, "none" if full else policy, False, samples))
        account = overlapped(layer_prices.stage(False, 1, False))
        if full:
            account = account + layer_again(layer_prices)
        forward, backward = float(row["fwd_ms"]) / 1e3, float(row["bwd_ms"]) / 1e3
        run = LayerRun(row["experiment"], forward, backward, candidate, account)
        timed.append(run)
    return tuple(timed)


def overlapped(account: Account) -> Account:
    """Drops collectives that are hidden. By the time of table 4, those of an input's
    gradient ran while the weight's was computed, and half of what is gathered again
    while the input's was (Korthikanti 2022, section 4.2.2)."""
    exposed = {"all_reduce": 0.0, "reduce_scatter": 0.0, "all_gather": 0.5}
    exchanges = []
    for e in account.backward.exchanges:
        share = exposed.get(e.kind, 1.0)
        exchanges.append(replace(e, calls=share * e.calls, bytes=share * e.bytes))
    return replace(
        account, backward=replace(account.backward, exchanges=tuple(exchanges))
    )


UNFITTED = Constants(1.0, 1.0, 1.0)


@cache
def fitted() -> Constants:
    """The constants with the least squared errors over the calibration rows."""
    small = [r for r in runs("sc21_table1") if _billions(r) < FITTED_UP_TO]
    layers = layer_runs()

    def error(constants: Constants) -> float:
        steps = [math.log(r.predict(constants) / r.seconds) for r in small]
        both = [(sum(x.predict(constants)), x.forward + x.backward) for x in layers]
        of_layers = [math.log(got / known) for got, known in both]
        return sum(e * e for e in (*steps, *of_layers))

    most = {"products": 1.0, "copies": 1.0, "links": 1.0}
    return descend(Constants(0.75, 0.8, 0.6), error, most, step=0.1, until=0.002)


def _billions(run: Run) -> float:
    return float(run.name.removeprefix("GPT-").removesuffix("B"))
