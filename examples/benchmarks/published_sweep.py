"""Throughput of the Ultra-Scale sweep on H100s, predicted.

Links are those that the sweep's authors measured on the same machine; what products
reach, the host's times and stalls are fitted to one of the sweep's two models, and the
other is predicted. Stalls do not change which plans are picked: they are there for the
order of the slow ones.

nanotron adds gradients up in 32 bits, and starts ops one by one from Python: where they
are short, the host is what takes the time. Without ZeRO it reduces buckets of gradients
while the last backward runs; with it, all of them after that, in slices of each
parameter that the host copies one by one. What a stage sends to another is announced by
two small messages that the host waits for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from statistics import mean

from autopar.machine.hardware import cluster_of
from autopar.passes.mesh import Mesh
from autopar.passes.price.account import Account, Held, PartCost
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.estimate import step_parts
from autopar.passes.price.price import retimed
from autopar.passes.price.price_layers import Prices
from autopar.passes.price.share import share
from autopar.passes.price.stage_seconds import stage_seconds
from autopar.passes.search.by_formula import rough, rough_seconds
from autopar.passes.search.candidates import Space
from autopar.passes.search.search import accounts_of
from autopar.planner.planner import make_prices
from examples.benchmarks.published_fit import descend
from examples.benchmarks.published_models import Row, in_turn, llama, read
from examples.benchmarks.published_rows import mesh_of

MODELS = ("1B", "8B")
BATCH, TOKENS = 256, 256 * 4096
# Bytes of a parameter and its gradient; of what Adam works on, in 4 bytes each.
WEIGHTS, OPTIMIZER = 2 + 4, 12
TENSORS = 6  # parameters of a layer, with q, k, v in one and gate and up in one
BUCKET = 25e6  # bytes of parameters whose gradients are reduced at once
MESSAGES = 3  # of each tensor between stages
# What adding a gradient up in 4 bytes moves more than in its own type.
ADDED = 8
# Of a device's memory: near its end, allocations take most of the time. On two nodes
# the 8B as pp=2,dp=8, with 64.8 of 80 GB, is 2.6 times slower than what has 62.
USABLE = 0.8


@dataclass(frozen=True)
class Links:
    """Shares of the peak that links in a node and the network reach; seconds of a
    ring's step over the network."""

    inside: float = 0.7
    network: float = 0.6
    step: float = 2e-5

    def of(self, cluster: Cluster) -> Cluster:
        near, *far = cluster.levels
        levels = [replace(near, efficiency=self.inside)]
        for level in far:
            levels.append(replace(level, efficiency=self.network, step=self.step))
        return replace(cluster, levels=tuple(levels))


@dataclass(frozen=True)
class Constants:
    """What is fitted: the share of the peak that products reach, the seconds of the
    host for each op and for each slice of a parameter that it copies, and the seconds
    that a rank is late, see `Run.stalls`."""

    links: Links
    products: float = 0.7
    dispatch: float = 5e-5
    copy: float = 5e-6
    stall: float = 0.0

    def of(self, cluster: Cluster) -> Cluster:
        device = replace(
            cluster.device, efficiency=self.products, dispatch=self.dispatch, fused=True
        )
        return replace(self.links.of(cluster), device=device)


@dataclass(frozen=True)
class Run:
    """A measured run. throughput: tokens a second and GPU, the mean of its repeats.
    accounts: of the first, an inner and the last stage."""

    nodes: int
    candidate: Candidate
    throughput: float
    accounts: tuple[Account, ...]

    @property
    def stalls(self) -> float:
        """What a pipeline over nodes adds, in seconds that a rank is late: in layers
        ranks along tp wait for each other, and by messages nodes do. How late the
        latest of them is grows as their logarithm (Hoefler, Schneider, Lumsdaine 2010,
        noise with an exponential tail)."""
        axis_size = self.candidate.mesh.axis_size
        if axis_size("pp") == 1 or self.nodes == 1:
            return 0.0
        layers = max(self.candidate.layers) * self.candidate.microbatches
        return layers * (axis_size("tp") - 1) * math.log2(self.nodes)

    def predict(self, constants: Constants) -> float:
        """Tokens a second and GPU."""
        cluster = constants.of(_cluster(self.nodes))
        priced = (retimed(a, cluster.device) for a in self.accounts)
        accounts = [share(a, self.candidate, cluster.device) for a in priced]
        took = [stage_seconds(a, self.candidate.mesh, cluster) for a in accounts]
        both = [[a] for a in accounts], [[t] for t in took]
        seconds = rough_seconds(both[0], self.candidate, cluster, both[1])
        if self.candidate.zero:
            seconds += _at_once(self.accounts[0], self.candidate, cluster)
            slices = self.candidate.data_parallel * max(self.candidate.layers) * TENSORS
            seconds += 2 * slices * constants.copy  # gradients, and parameters
        else:
            seconds += _in_buckets(accounts[0], self.candidate, cluster)
        seconds += self.stalls * constants.stall
        return TOKENS / seconds / cluster.devices

    @property
    def fits(self) -> bool:
        return self.memory < USABLE * _cluster(self.nodes).device.memory

    @property
    def memory(self) -> float:
        """Bytes of the rank that needs most, as predicted."""
        ranks = self.candidate.mesh.axis_size("pp")
        in_flight = min(ranks, self.candidate.microbatches)
        shares = self.candidate.data_parallel if self.candidate.zero else 1
        return max(
            a.held.parameters / 2 * (WEIGHTS + OPTIMIZER / shares)
            + a.footprint.peak(max(1, in_flight - 2 * i))
            for i, a in enumerate(self.accounts)
        )


def _in_buckets(account: Account, candidate: Candidate, cluster: Cluster) -> float:
    """Seconds more (or less) than for all gradients at once after the last backward,
    where they are reduced in buckets, beside it."""
    if candidate.mesh.axis_size("dp") == 1:
        return 0.0
    took = stage_seconds(account, candidate.mesh, cluster)
    buckets = account.held.parameters / BUCKET
    link = cluster.link(candidate.mesh, ("dp",))
    starts = buckets * link.seconds("all_reduce", 0.0)
    reduced = step_parts(account, candidate.mesh, cluster)["gradients dp"] + starts
    return starts - min(reduced, took.backward + took.weight)


def _at_once(account: Account, candidate: Candidate, cluster: Cluster) -> float:
    """Seconds less than in buckets, where one collective scatters all gradients and one
    gathers all parameters."""
    link = cluster.link(candidate.mesh, ("dp",))
    shared = share(account, candidate, cluster.device)
    parts = step_parts(shared, candidate.mesh, cluster)
    whole = link.seconds("reduce_scatter", account.held.trained)
    whole += link.seconds("all_gather", account.held.read)
    return whole - parts["gradients dp"] - parts["parameters dp"]


def _cluster(nodes: int) -> Cluster:
    return cluster_of(f"{8 * nodes}xH100")


@cache
def runs(model: str) -> tuple[Run, ...]:
    """All measured runs of a model."""
    repeats: dict[tuple[int, str], list[Row]] = {}
    for row in read("ultrascale_h100"):
        if row["model"] == model:
            candidate = _candidate(row)
            repeats.setdefault((int(row["nodes"]), str(candidate)), []).append(row)
    measured = []
    for (nodes, _), rows in repeats.items():
        throughput = mean(float(row["tok_s_gpu"]) for row in rows)
        cluster = Constants(Links()).of(_cluster(nodes))
        prices = _prices(rows[0])
        space = Space(cluster, BATCH, int(rows[0]["layers"]), {})
        ranked = rough(_candidate(rows[0]), space, prices)
        assert ranked is not None, "it ran, so it has layers enough"
        candidate = ranked[-1]
        stages = accounts_of(candidate, prices)
        # Those inside are alike: one of them does.
        kinds = [*stages[:2], *stages[2:][-1:]]
        accounts = tuple(map(_of_nanotron, in_turn(kinds, tp=1)))
        measured.append(Run(nodes, candidate, throughput, accounts))
    return tuple(measured)


def _candidate(row: Row) -> Candidate:
    mesh = mesh_of(row)
    samples, microbatches = int(row["mbs"]), int(row["n_microbatches"])
    zero = int(row["zero"]) if mesh.axis_size("dp") > 1 else 0
    return Candidate(mesh, samples, microbatches, "1f1b", 1, zero, "none", ())


def _prices(row: Row) -> Prices:
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    return _prices_of(
        tuple(int(row[name]) for name in sizes), tied=row["tied_embeddings"] == "1"
    )


@cache
def _prices_of(sizes: tuple[int, ...], tied: bool) -> Prices:
    return make_prices(llama(*sizes, tied=tied), Constants(Links()).of(_cluster(1)))


def _of_nanotron(account: Account) -> Account:
    """Gradients, and what the optimizer works on, have 4 bytes; messages to other
    stages are announced."""
    forward, backward = (
        PartCost(
            exchanges=tuple(
                replace(e, calls=(MESSAGES - 1) * e.calls, bytes=0.0)
                for e in part.exchanges
                if e.kind == "send"
            )
        )
        for part in (account.forward, account.backward)
    )
    backward = replace(backward, moved=ADDED * account.held.parameters / 2)
    return account + Account(forward, backward, held=Held(trained=account.held.trained))


# --- Fitting ----------------------------------------------------------------------


@cache
def links() -> Links:
    """Fits links to the measured gathers and scatters, not to all-reduces of many
    nodes: those given are several times slower than the same runs were."""

    def error(tried: Links) -> float:
        pairs = (collectives(kind, tried) for kind in ("all_gather", "reduce_scatter"))
        return sum(abs(math.log(got / known)) for got, known in chain(*pairs))

    most = {"inside": 1.0, "network": 1.0, "step": math.inf}
    return descend(Links(), error, most, until=0.005)


def collectives(kind: str, tried: Links) -> list[tuple[float, float]]:
    """Lists seconds of each measured collective of a kind, predicted and measured."""
    pairs = []
    for row in read("ultrascale_collectives"):
        if row["kind"] != kind:
            continue
        n, whole = int(row["ranks"]), int(row["mib"]) * 2.0**20
        cluster = tried.of(_cluster(int(row["nodes"])))
        link = cluster.link(Mesh((("dp", n),)), ("dp",))
        # What is plotted is what each rank sends in a ring.
        sent = whole * (n - 1) / n * (2 if row["kind"] == "all_reduce" else 1)
        took = sent / (float(row["gb_per_second"]) * 1e9)
        pairs.append((link.seconds(row["kind"], whole), took))
    return pairs


@cache
def fitted(model: str) -> Constants:
    """The constants that predict a model's runs best, on average: all but stalls of
    those that are at least half as fast as the best on as many nodes; stalls of all
    that have a pipeline over several nodes."""
    every = runs(model)
    faster = [r for r in every if r.throughput > best(model, r.nodes) / 2]
    piped = [r for r in every if r.stalls]

    def error(constants: Constants, rows: list[Run]) -> float:
        return mean(abs(math.log(r.predict(constants) / r.throughput)) for r in rows)

    most = {"products": 1.0, "dispatch": math.inf, "copy": math.inf}
    well = descend(Constants(links()), lambda c: error(c, faster), most)
    started = replace(well, stall=1e-3)
    return descend(started, lambda c: error(c, piped), {"stall": math.inf})


@cache
def best(model: str, nodes: int) -> float:
    return max(run.throughput for run in runs(model) if run.nodes == nodes)
