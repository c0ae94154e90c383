"""Throughput of the Ultra-Scale sweep on H100s, predicted, and the plans picked by it.

Constants are fitted to one of its two models, the other is predicted. nanotron adds
gradients up in 32 bits, and starts ops one by one from Python: where they are short,
the host is what takes the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

from autopar.hardware import cluster_of
from autopar.planner import make_prices
from examples.benchmarks.published_models import Row, in_turn, llama, read
from passes.cluster import Cluster
from passes.estimate import Candidate, stage_seconds, step_parts
from passes.mesh import Mesh
from passes.price import Account, footprint_of, retimed
from passes.search import (
    ALIKE,
    Prices,
    Space,
    accounts_of,
    complexity,
    rough,
    rough_seconds,
)

MODELS = ("1B", "8B")
BATCH, TOKENS = 256, 256 * 4096
# Bytes of a parameter and its gradient; of what Adam works on, in 4 bytes each.
WEIGHTS, OPTIMIZER = 2 + 4, 12
TENSORS = 6  # parameters of a layer, with q, k, v in one and gate and up in one
USABLE = 0.85  # of a device's memory: near its end, allocations take most of the time


@dataclass(frozen=True)
class Constants:
    """What is fitted: the shares of peak that products, links inside of a node, and the
    network reach, the seconds of the host for each op, and of a message."""

    products: float = 0.7
    links: float = 0.6
    network: float = 0.4
    dispatch: float = 4e-5
    latency: float = 1.5e-5

    def of(self, cluster: Cluster) -> Cluster:
        device = replace(
            cluster.device,
            efficiency=self.products,
            dispatch=self.dispatch,
            fused=True,
        )
        shares = (self.links, self.network)
        levels = tuple(
            replace(level, efficiency=share, latency=seconds)
            for level, share, seconds in zip(
                cluster.levels, shares, (5e-6, self.latency), strict=False
            )
        )
        return replace(cluster, device=device, levels=levels)


@dataclass(frozen=True)
class Run:
    """A measured run. throughput: tokens a second and GPU, the mean of its repeats.
    accounts: of the first, an inner and the last stage."""

    nodes: int
    candidate: Candidate
    throughput: float
    measured_memory: float
    accounts: tuple[Account, ...]

    def predict(self, constants: Constants) -> float:
        """Tokens a second and GPU."""
        cluster = constants.of(_cluster(self.nodes))
        accounts = [retimed(a, cluster.device) for a in self.accounts]
        seconds = rough_seconds(accounts, self.candidate, cluster)
        calls = _calls(self.candidate, cluster)
        if self.candidate.zero or self.candidate.mesh.axis_size("pp") > 1:
            seconds += calls
        else:
            seconds -= _hidden(accounts[0], self.candidate, cluster, calls)
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
            a["memory", "parameters"] / 2 * (WEIGHTS + OPTIMIZER / shares)
            + footprint_of(a).most(max(1, in_flight - 2 * i))
            for i, a in enumerate(self.accounts)
        )


def _calls(candidate: Candidate, cluster: Cluster) -> float:
    """Seconds of messages: nanotron reduces the gradient of each parameter by itself,
    where `passes.estimate` counts all in one."""
    dp = candidate.mesh.axis_size("dp")
    if dp == 1:
        return 0.0
    latency = cluster.link(candidate.mesh, ("dp",)).latency
    return TENSORS * max(candidate.layers) * 2 * (dp - 1) * latency


def _hidden(
    account: Account, candidate: Candidate, cluster: Cluster, calls: float
) -> float:
    """Seconds less where gradients are reduced while the last backward runs, as without
    ZeRO and without a pipeline, whose own messages have to come through."""
    took = stage_seconds(account, candidate, cluster)
    reduced = step_parts(account, candidate, cluster).get("gradients dp", 0.0)
    return min(reduced, took.backward + took.weight - calls)


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
    found = []
    for (nodes, _), rows in repeats.items():
        throughput = mean(float(row["tok_s_gpu"]) for row in rows)
        cluster = Constants().of(_cluster(nodes))
        prices = _prices(rows[0])
        space = Space(cluster, BATCH, int(rows[0]["layers"]), tp=())
        ranked = rough(_candidate(rows[0]), space, prices)
        assert ranked is not None, "it ran, so it has layers enough"
        candidate = ranked[-1]
        stages = accounts_of(candidate, prices)
        # Those inside are alike: one of them does.
        kinds = [*stages[:2], *stages[2:][-1:]]
        accounts = tuple(map(_in_float32, in_turn(kinds, tp=1)))
        memory = max(float(row["mem_gb"]) for row in rows)
        found.append(Run(nodes, candidate, throughput, memory, accounts))
    return tuple(found)


def _candidate(row: Row) -> Candidate:
    sizes = [(axis, int(row[axis])) for axis in ("pp", "dp", "tp")]
    mesh = Mesh(tuple((axis, n) for axis, n in sizes if n > 1))
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
    return make_prices(llama(*sizes, tied=tied), Constants().of(_cluster(1)))


def _in_float32(account: Account) -> Account:
    """Gradients, and what the optimizer works on, have 4 bytes."""
    return account + Account({("memory", "trained"): account["memory", "trained"]})


# --- Fitting ----------------------------------------------------------------------


@cache
def fitted(model: str) -> Constants:
    """The constants that predict a model's runs best, on average, of those that are
    at least half as fast as the best on as many nodes."""

    faster = [r for r in runs(model) if r.throughput > best(model, r.nodes) / 2]

    def error(constants: Constants) -> float:
        return mean(
            abs(math.log(run.predict(constants) / run.throughput)) for run in faster
        )

    return descend(Constants(), error)


@cache
def best(model: str, nodes: int) -> float:
    return max(run.throughput for run in runs(model) if run.nodes == nodes)


def descend(start: Constants, error: Callable[[Constants], float]) -> Constants:
    """Steps along one constant at a time, which halve while nothing gets better."""
    chosen, least, step = start, error(start), 0.2
    while step > 0.02:
        tries = [
            replace(chosen, **{name: getattr(chosen, name) * factor})
            for name in ("products", "links", "network", "dispatch", "latency")
            for factor in (1 + step, 1 / (1 + step))
        ]
        tries = [c for c in tries if max(c.products, c.links, c.network) <= 1]
        errors = [error(c) for c in tries]
        if min(errors) < least:
            least = min(errors)
            chosen = tries[errors.index(least)]
        else:
            step /= 2
    return chosen


# --- Results ----------------------------------------------------------------------


@dataclass(frozen=True)
class Picked:
    """Of the runs of a model on so many nodes: what we pick, what it loses to the best
    that was measured, and how well the order is predicted: rank correlation of all,
    and of those at least half as fast as the best."""

    model: str
    nodes: int
    count: int
    pick: Candidate
    best: Candidate
    regret: float
    correlation: float
    faster: float


def picked(model: str, constants: Constants) -> list[Picked]:
    found = []
    for nodes in sorted({run.nodes for run in runs(model)}):
        own = [run for run in runs(model) if run.nodes == nodes]
        predicted = [run.predict(constants) for run in own]
        measured = [run.throughput for run in own]
        ours = _pick(own, predicted)
        both = zip(predicted, measured, strict=True)
        half = [(x, y) for x, y in both if y > max(measured) / 2]
        fastest = own[measured.index(max(measured))]
        found.append(
            Picked(
                model,
                nodes,
                len(own),
                ours.candidate,
                fastest.candidate,
                1 - ours.throughput / fastest.throughput,
                rank_correlation(predicted, measured),
                rank_correlation(*zip(*half, strict=True)),
            )
        )
    return found


def _pick(own: Sequence[Run], predicted: Sequence[float]) -> Run:
    """What the planner would choose of these: the simplest of those that fit and are
    as fast, to within what estimates can tell."""
    fitting = [(x, run) for x, run in zip(predicted, own, strict=True) if run.fits]
    fastest = max(x for x, _ in fitting)
    alike = [(x, run) for x, run in fitting if x * (1 + ALIKE) >= fastest]
    return min(alike, key=lambda pair: (complexity(pair[1].candidate), -pair[0]))[1]


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's, of values without ties."""

    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [order.index(i) for i in range(len(values))]

    n = len(xs)
    apart = sum((a - b) ** 2 for a, b in zip(ranks(xs), ranks(ys), strict=True))
    return 1 - 6 * apart / (n * (n * n - 1))
