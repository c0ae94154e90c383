"""Training the same GPT with autopar and with what a user would pick instead.

    python examples/benchmarks/peers.py --config mid --rounds 5

Every run is a process group of its own, fp32 on gloo with one thread a rank, and must
give the losses of a single process. A speed-up is the peer's seconds over ours in the
same round, so that a slow minute of the machine weighs on both; the table shows the
median over the rounds. `memory` is our peak bytes over the peer's.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import median

from tabulate import tabulate

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the examples are found from any directory

from examples.benchmarks.peer_runs import CONFIGS, RUNS  # noqa: E402
from examples.benchmarks.processes import run as start  # noqa: E402

MODULE = "examples.benchmarks.peer_runs"
TOLERANCE = 1e-4  # of a loss, fp32 sums in another order
TIMEOUT = 1800  # seconds a run

# (peer, ours), neighbours in time
PAIRS = (
    ("ddp2", "ours-dp2"),
    ("fsdp2", "ours-zero3"),
    ("pipelining2", "ours-pp2"),
    ("dtensor2", "ours-tp2"),
    ("dtensor2-sp", "ours-tp2-sp"),
    ("pipelining2-dtensor2-sp", "ours-pp2-tp2-sp"),
)


@dataclass(frozen=True)
class Result:
    """Medians of a run: seconds a step, CPU seconds of all ranks; bytes of one."""

    run: str
    wall: float
    cpu: float
    peak: int
    losses: list[float]


def launch(run: str, config: str, steps: int) -> Result:
    """Run once in new processes. Raises RuntimeError with the end of its output."""
    ranks = RUNS[run].ranks
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m"]
    command += [MODULE, run, "--config", config, "--steps", str(steps)]
    printed = start(command, TIMEOUT)
    lines = [line for line in printed.splitlines() if line.startswith('{"run"')]
    if not lines:
        raise RuntimeError(f"{run} printed no result:\n{printed[-4000:]}")
    return Result(**json.loads(lines[-1]))


def check_losses(result: Result, reference: Result) -> float:
    """The largest difference to the single process; above TOLERANCE, RuntimeError."""
    pairs = zip(result.losses, reference.losses, strict=True)
    difference = max(abs(mine - exact) for mine, exact in pairs)
    if not difference < TOLERANCE:  # nor nan
        raise RuntimeError(
            f"{result.run} computes something else: its losses differ by {difference}\n"
            f"  {result.run}: {result.losses}\n  single: {reference.losses}"
        )
    return difference


def play_round(
    number: int, runs: Sequence[str], config: str, steps: int
) -> list[Result]:
    """Each run once: the single process first, then the pairs, who begins in turns."""
    results = [launch("single", config, steps)]
    for pair in PAIRS:
        for run in pair if number % 2 == 0 else reversed(pair):
            if run in runs:
                results.append(launch(run, config, steps))
                check_losses(results[-1], results[0])
    for result in results:
        print(f"round {number}  {result.run:24} {result.wall:8.4f} s", file=sys.stderr)
    return results


def table(rounds: Sequence[Sequence[Result]]) -> str:
    """One line a run, ours with its ratios to the peer above it."""
    by_run: dict[str, list[Result]] = {}
    for result in (result for results in rounds for result in results):
        by_run.setdefault(result.run, []).append(result)
    peer_of = {ours: peer for peer, ours in PAIRS}
    lines = []
    for run in sorted(by_run, key=list(RUNS).index):
        mine, peers = by_run[run], by_run.get(peer_of.get(run, ""), [])
        worst = max(
            check_losses(result, reference)
            for result, reference in zip(mine, by_run["single"], strict=True)
        )
        lines.append(
            {
                "run": run,
                "ranks": RUNS[run].ranks,
                "s/step": median(result.wall for result in mine),
                "CPU s/step": median(result.cpu for result in mine),
                "MiB/rank": mine[0].peak / 2**20,
                "speed-up": paired(peers, mine, lambda result: result.wall),
                "by CPU s": paired(peers, mine, lambda result: result.cpu),
                "memory": paired(mine, peers, lambda result: result.peak),
                "loss off by": f"{worst:.0e}",
            }
        )
    return tabulate(lines, headers="keys", floatfmt=".3f", disable_numparse=[8])


def paired(
    left: Sequence[Result], right: Sequence[Result], of: Callable[[Result], float]
) -> float | None:
    """The median of left over right of the same round, None where one is missing."""
    if not (left and right):
        return None
    return median(of(a) / of(b) for a, b in zip(left, right, strict=True))


def selected(patterns: str) -> list[str]:
    """The runs that one of the comma-separated shell patterns names."""
    chosen = [
        run for run in RUNS if any(fnmatch(run, glob) for glob in patterns.split(","))
    ]
    if not chosen:
        raise SystemExit(f"--only {patterns}: none of {', '.join(RUNS)}")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=CONFIGS, default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps a run")
    parser.add_argument("--only", default="*", help="runs, such as 'ddp*,ours-dp2'")
    options = parser.parse_args()
    runs = selected(options.only)
    rounds = [
        play_round(number, runs, options.config, options.steps)
        for number in range(options.rounds)
    ]
    print(CONFIGS[options.config], f"{options.rounds} rounds of {options.steps} steps")
    print(table(rounds))


if __name__ == "__main__":
    main()
