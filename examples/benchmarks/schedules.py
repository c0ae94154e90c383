"""Pipeline schedules side by side, where the bubble is most of what there is to gain.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/benchmarks/schedules.py

One run: every schedule trains the same model on the same processes, a step each in
turn, so that a slow minute of the machine weighs on all. `speed-up` is the median, over
the rounds, of 1F1B's seconds over the schedule's own in the same round; `on paper` is
the same by the simulator, with the seconds that were measured of the stages. With one
core for each process a bubble is time in which a core does nothing.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from tabulate import tabulate

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the examples are found from any directory

import autopar  # noqa: E402
from autopar.reports.inspection import devices_of  # noqa: E402
from autopar.reports.simulation import simulate_program  # noqa: E402
from examples.benchmarks.gpu_models import batch_of  # noqa: E402
from examples.gpt import GPT, Config  # noqa: E402

BASE = "1f1b"
# schedule, stages a rank
RUNS = (
    (BASE, 1),
    ("gpipe", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("looped-bfs", 4),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("auto", 1),
    ("auto", 2),
    ("auto", 4),
)
TOLERANCE = 1e-4  # of a loss, fp32 sums in another order


@dataclass(frozen=True)
class Runner:
    """A compiled step, and what the simulator says of it."""

    name: str
    step: autopar.Step
    paper: float
    bubble: float


def build(
    config: Config, batch: dict[str, torch.Tensor], microbatches: int
) -> list[Runner]:
    runners = []
    for schedule, stages_per_rank in RUNS:
        torch.manual_seed(0)
        step = autopar.compile(
            GPT(config),
            f"pp={dist.get_world_size()}",
            microbatches=microbatches,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            example_inputs=batch,
        )
        expected = simulate_program(step.program, devices_of(step.program))
        name = schedule + (f", {stages_per_rank} stages" if stages_per_rank > 1 else "")
        if schedule == "auto":
            name += f" ({step.program.schedule.name})"
        runners.append(Runner(name, step, expected.total, expected.timeline.bubble))
    return runners


def timed(runner: Runner, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Seconds of a step, from when all ranks are there until the last is done."""
    for p in runner.step.parameters():
        p.grad = None
    dist.barrier()
    begin = time.perf_counter()
    loss = runner.step(**batch)
    dist.barrier()
    return time.perf_counter() - begin, float(loss)


def rounds(
    runners: list[Runner], batch: dict[str, torch.Tensor], count: int
) -> list[list[float]]:
    """Seconds, [rounds, runners], after one round to warm up; losses must agree."""
    walls = []
    for number in range(count + 1):
        results = [timed(runner, batch) for runner in runners]
        losses = [loss for _, loss in results]
        if max(losses) - min(losses) > TOLERANCE:
            raise RuntimeError(f"schedules disagree about the loss: {losses}")
        if number:
            walls.append([seconds for seconds, _ in results])
    return walls


def table(runners: list[Runner], seconds: list[list[float]]) -> str:
    rows = []
    for i, runner in enumerate(runners):
        rows.append(
            {
                "schedule": runner.name,
                "ms/step": 1e3 * median(row[i] for row in seconds),
                "speed-up": median(row[0] / row[i] for row in seconds),
                "on paper": runners[0].paper / runner.paper,
                "bubble on paper": f"{runner.bubble:.1%}",
            }
        )
    return tabulate(rows, headers="keys", floatfmt=("", ".1f", ".3f", ".3f"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = Config(options.layers, options.width, 4, options.context, 512)
    batch = batch_of(config, options.batch)
    runners = build(config, batch, options.microbatches)
    seconds = rounds(runners, batch, options.rounds)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, {options.microbatches} microbatches, "
            f"{options.rounds} rounds"
        )
        print(table(runners, seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
