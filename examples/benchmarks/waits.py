"""What a step no longer waits for: each change beside what was done before it.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/benchmarks/waits.py

One run: both ways take turns on the same processes, so that a slow minute of the
machine weighs on both. `measured` is the median, over the rounds, of the seconds as
before over those as now in the same round; `on paper` is the same by `autopar
simulate`, for a device on which a step as before takes what was measured of it.

Processes of one machine talk through its memory, by its cores: nothing is waited for
that something else could be computed beside. So --link gives them links of so many
bytes a second, which carry one collective after the other: what it takes is slept, not
worked. With --link 0 collectives are as fast as gloo is here; no paper knows how fast.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the examples are found from any directory

import autopar  # noqa: E402
from autopar.passes.price.cluster import Cluster, Device, Level  # noqa: E402
from autopar.passes.program import Program  # noqa: E402
from autopar.reports.simulation import simulate_program  # noqa: E402
from autopar.runtime.comm.coalesced import Layout  # noqa: E402
from autopar.runtime.comm.comm import Comm  # noqa: E402
from autopar.runtime.comm.work import Work  # noqa: E402
from examples.benchmarks.gpu_models import batch_of  # noqa: E402
from examples.gpt import GPT, Config  # noqa: E402

LATENCY = 5e-5  # of a link, in seconds
Run = Callable[[], object]


@dataclass(frozen=True)
class Change:
    """What is done as before, and as now. paper: seconds of the first -> the same over
    those of the second, by a simulation. times: in a row, if it takes little."""

    name: str
    before: Run
    now: Run
    paper: Callable[[float], float] | None = None
    times: int = 1


# --- a link that takes time -----------------------------------------------------------


class Slow(Work):
    """A transfer that is not there before its time."""

    def __init__(self, work: Work, there: float) -> None:
        self.work, self.there = work, there

    def wait(self) -> Tensor:
        result = self.work.wait()
        time.sleep(max(0.0, self.there - time.perf_counter()))
        return result


class Wire:
    """Makes collectives of a rank take what they would on a link, one by one."""

    def __init__(self, comm: Comm, level: Level) -> None:
        self.level, self.free, ranks = level, 0.0, comm.mesh.size
        ways = {"_start_reduce_": 2.0, "_start_exchange": 1.0, "_start_gather": 1.0}
        for name, times in ways.items():
            start = partial(
                self.start, getattr(comm, name), times * (ranks - 1) / ranks
            )
            setattr(comm, name, start)

    def start(
        self, call: Callable[..., Work], share: float, x: Tensor, *args: object
    ) -> Work:
        sent = share * x.nbytes / (self.level.bytes_per_second * self.level.efficiency)
        begin = max(self.free, time.perf_counter())
        self.free = begin + self.level.latency + sent
        return Slow(call(x, *args), self.free)


# --- gradients ------------------------------------------------------------------------


def gradients(zero: int, config: Config, link: float) -> Change:
    batch = batch_of(config, 4)
    ranks = dist.get_world_size()
    level = Level(ranks, link or 1e9, LATENCY, efficiency=1.0)
    steps = []
    for as_before in (True, False):
        torch.manual_seed(0)
        step = autopar.compile(
            GPT(config), f"dp={ranks}", zero=zero, example_inputs=batch, prove=False
        )
        if link:
            Wire(step.comm, level)
        step.executor.overlaps = not as_before
        steps.append(step)

    def run(step: autopar.Step) -> None:
        for p in step.parameters():
            p.grad = None
        step(**batch)

    paper = partial(on_paper, steps[0].program, level)
    before, now = (partial(run, step) for step in steps)
    name = "gradients leave beside the last backward, zero=0"
    if zero:
        name = "and parameters come beside the first forward, zero=1"
    return Change(name, before, now, paper if link else None)


# Updates of weights are not measured: they take no time.
DEVICE = Device("here", 1e12, 1e18, {"float32": 1e11})


def on_paper(program: Program, level: Level, before: float) -> float:
    """before: measured seconds of a step that waits for all that it sends."""
    cluster = Cluster(DEVICE, level.devices, (level,))

    def seconds(slower: float) -> float:
        """A step's, where computing takes so many times longer than was guessed."""
        stages = []
        for stage in program.stages:
            parts = stage.account.microbatch.values()
            parts = (part.changed(seconds=slower * part.seconds) for part in parts)
            stages.append(replace(stage, account=stage.account.with_parts(*parts)))
        return simulate_program(replace(program, stages=tuple(stages)), cluster).total

    waited = "autopar.passes.price.estimate.exposed_seconds"
    with mock.patch(waited, lambda moving, *beside: moving):
        computing = seconds(2.0) - seconds(1.0)
        slower = 1.0 + (before - seconds(1.0)) / computing
    return before / seconds(slower)


# --- what many small kernels did ------------------------------------------------------


def norms(count: int) -> Change:
    many = [torch.randn(64, 64) for _ in range(count)]

    def before() -> None:
        total = torch.zeros((), dtype=torch.float64)
        for x in many:
            total += torch.linalg.vector_norm(x, dtype=torch.float64) ** 2

    def now() -> None:
        torch.stack(torch._foreach_norm(many, 2, dtype=torch.float64)).square_().sum()

    return Change(f"the norm of {count} gradients: all at once", before, now, times=10)


def packing(ranks: int) -> Change:
    wholes = [torch.randn(64, 64) for _ in range(12)]
    layout = Layout.of(wholes, [1] * 12, [[64 // ranks] * ranks] * 12)

    def before() -> None:
        flat = wholes[0].new_empty(sum(layout.counts))
        for rank, row in enumerate(flat.split(layout.counts)):
            for i, part in enumerate(layout.parts(row, rank)):
                extent = part.shape[1]
                part.copy_(wholes[i].narrow(1, rank * extent, extent))

    name = f"12 gradients packed for {ranks} ranks: a copy each"
    return Change(name, before, partial(layout.split, wholes), times=50)


# --- rounds ---------------------------------------------------------------------------


def timed(run: Run, times: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        run()
    dist.barrier()
    return (time.perf_counter() - begin) / times


def measured(change: Change, rounds: int) -> dict[str, object]:
    pairs = []
    for number in range(rounds + 1):  # the first to warm up
        order = (change.before, change.now)[:: 1 if number % 2 else -1]
        took = [timed(run, change.times) for run in order][:: 1 if number % 2 else -1]
        pairs += [took] if number else []
    before = median(a for a, _ in pairs)
    return {
        "change": change.name,
        "ms before": 1e3 * before,
        "ms now": 1e3 * median(b for _, b in pairs),
        "measured": median(a / b for a, b in pairs),
        "on paper": change.paper and change.paper(before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--link", type=float, default=1e8, help="bytes per second")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = Config(options.layers, options.width, 8, options.context, 512)
    changes = [gradients(zero, config, options.link) for zero in (0, 1)]
    changes += [norms(300), packing(8)]
    rows = [measured(change, options.rounds) for change in changes]
    if dist.get_rank() == 0:
        link = f"{options.link / 1e9:g} GB/s" if options.link else "gloo's own speed"
        print(
            f"{dist.get_world_size()} ranks, links of {link}, {options.rounds} rounds"
        )
        form = ("", ".3f", ".3f", ".2f", ".2f")
        print(tabulate(rows, headers="keys", floatfmt=form, missingval="-"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
