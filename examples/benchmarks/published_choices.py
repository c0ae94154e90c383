"""Our plans for the devices and batches of published runs, beside the plans that ran
there: each priced as `autopar plan` does it, on the network that they had."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.estimate import Estimate
from autopar.passes.price.price_layers import Prices
from autopar.passes.search.recompute_whole import with_whole_layers
from autopar.passes.search.search import run_on_paper
from autopar.planner.planner import ShortModel, find_plans, make_prices
from examples.benchmarks.published_models import Row, gpt
from examples.benchmarks.published_rows import (
    candidate_of,
    on_network,
    rows_of_runs,
    sizes_of,
)

TABLES = ("sc21_table1", "others", "held_out", "zero_bubble")


@dataclass(frozen=True)
class Task:
    """A model that ran on devices, with batches of so many samples. sizes: see
    `published_rows.sizes_of`. attention: see `published_models.gpt`. network: GB a
    second that each device sends out of its node."""

    name: str
    sizes: tuple[int, ...]
    attention: str
    devices: str
    network: float
    batch: int

    @property
    def cluster(self) -> Cluster:
        return on_network(self.devices, self.network)

    @property
    def model(self) -> ShortModel:
        return gpt(*self.sizes, attention=self.attention, precision="bf16-stream")

    def __str__(self) -> str:
        tokens = f"{self.batch} x {self.sizes[-1]} tokens"
        return f"{self.name} on {self.devices}, {tokens}"


@dataclass(frozen=True)
class Choice:
    """picked: our plan, the simplest of those that are as fast as the fastest, to
    within what estimates can tell. ran: the fastest of those that ran there and fit by
    our estimate; None: none does."""

    picked: Estimate
    fastest: Estimate
    ran: Estimate | None


def tasks(table: str) -> dict[Task, list[Candidate]]:
    """What ran, as which plans. table: of `TABLES`."""
    candidates: dict[Task, list[Candidate]] = {}
    for task, candidate in map(_task, rows_of_runs(table)):
        candidates.setdefault(task, []).append(candidate)
    return candidates


@dataclass(frozen=True)
class Planned:
    """What ran, at the price that `autopar plan` gives. row: of `rows_of_runs`."""

    task: Task
    estimate: Estimate
    row: Row

    @property
    def published(self) -> float:
        """Seconds of a step."""
        return float(self.row["iter_time_s"])

    @property
    def filled(self) -> float:
        """The share of a device's memory that it takes at its peak."""
        return self.estimate.peak / self.task.cluster.device.memory

    @property
    def error(self) -> float:
        return self.estimate.seconds / self.published - 1

    @property
    def error_of_whole_layers(self) -> float:
        """The relative error beside plans that recompute whole layers, as Megatron-LM
        does."""
        seconds = self.estimate.whole_layers or self.estimate.seconds
        return seconds / self.published - 1


def as_planned(table: str) -> Iterator[Planned]:
    """What ran, row by row, with the sequence split along tp where it was there."""
    for row in rows_of_runs(table):
        task, candidate = _task(row)
        sequence_parallel = row["sp"] == "1"
        cluster = task.cluster
        prices = _prices(replace(task, batch=0), sequence_parallel)
        e = run_on_paper(candidate, prices, cluster)
        e = with_whole_layers(e, prices, cluster)
        yield Planned(task, e, row)


FILLED = "24"  # microbatches: more are in no more memory


def filled(runs: Sequence[Planned]) -> list[Planned]:
    """One run of each schedule of zero bubble's paper."""
    return [run for run in runs if run.row["microbatches"] == FILLED]


@cache
def _prices(task: Task, sequence_parallel: bool) -> Prices:
    return make_prices(task.model, task.cluster, sequence_parallel=sequence_parallel)


def choose(task: Task, plans: Sequence[Candidate]) -> Choice:
    """Our plan for it."""
    cluster, of = task.cluster, task.model
    prices = make_prices(of, cluster)
    tried = [run_on_paper(plan, prices, cluster) for plan in plans]
    fitting = [e for e in tried if e.peak <= cluster.device.memory]
    ran = min(fitting, key=lambda e: e.seconds, default=None)
    best = find_plans(of, cluster, task.batch).best
    return Choice(best[0], min(best, key=lambda e: e.seconds), ran)


def _task(row: Row) -> tuple[Task, Candidate]:
    candidate = candidate_of(row)
    batch = candidate.samples * candidate.microbatches * candidate.data_parallel
    devices, network = f"{row['gpus']}x{row['device']}", float(row["network_gb"])
    task = Task(row["model"], sizes_of(row), row["attention"], devices, network, batch)
    return task, candidate
