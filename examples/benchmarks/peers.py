"""Training the same GPT with autopar and with what a user would pick instead.

    python examples/benchmarks/peers.py --config small --only '*-2/*' --rounds 5

Each rank is a process, fp32 on gloo with one thread. What does the same on as many
ranks (see `ROWS` of `peer_runs.py`) is started one after another, and then makes a step
each in turn, so that a slow minute of the machine weighs on all: ratios are medians of
those in a round. Every loss must be that of the untouched model in a single process.

First steps are counted from the start of the processes: `cold` with nothing on disk,
`warm` with what that start has left there, caches of torch.compile and plans and code
of ours. MiB are the most bytes of tensors alive at once on a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the examples are found from any directory

from examples.benchmarks.peer_runs import CONFIGS, ROWS  # noqa: E402
from examples.benchmarks.peer_tables import best_table, drawing, run_table  # noqa: E402
from examples.benchmarks.processes import environments, start  # noqa: E402

MODULE = "examples.benchmarks.peer_runs"
REFERENCE = "single/torch-eager"
TOLERANCE = 1e-4  # of a loss, fp32 sums in another order
TIMEOUT = 900  # seconds of a step, compilation included
# Steps after the first that are not counted: in them our ranks compare all that should
# be alike, which later is done every 32 steps.
WARM = 4


@dataclass
class Result:
    """A run's seconds of its first steps, and of the step in each round: of the wall,
    and of all its ranks' CPUs. peak: bytes of one rank. off: of its losses, at most."""

    cold: float
    warm: float
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: int = 0
    off: float = 0.0


class Run:
    """The processes of a run, which make steps as they are told."""

    def __init__(
        self,
        name: str,
        config: str,
        folder: Path,
        losses: Sequence[float] | None = None,
    ) -> None:
        self.name, self.config, self.folder = name, config, folder
        self.expected, self.losses = losses, list[float]()
        # Ranks that share two cores gain nothing by processes that compile for them.
        self.caches = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self.caches["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torch")

    @contextmanager
    def started(self) -> Iterator[float]:
        """The context in which it runs, with the seconds until its first step."""
        self.losses.clear()
        ranks = ROWS[self.name.split("/")[0]].ranks
        of = self.name, self.config, str(self.folder)
        command = [sys.executable, "-m", MODULE, *of]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with tempfile.TemporaryFile("w+") as self.errors, ExitStack() as stack:
            began = time.perf_counter()
            self.processes = [
                stack.enter_context(
                    start(command, self.caches | own, stderr=self.errors, **pipes)
                )
                for own in environments(ranks)
            ]
            self("step")
            yield time.perf_counter() - began
            for process in self.processes:
                process.stdin.close()
            for process in self.processes:
                process.wait(TIMEOUT)

    def __call__(self, word: str) -> list[dict]:
        """What each rank answers. Raises: RuntimeError for one that does not, and for
        a loss that is not the single process's."""
        for process in self.processes:
            print(word, file=process.stdin, flush=True)
        late = threading.Timer(TIMEOUT, self._kill)
        late.start()
        try:
            ranks = [json.loads(self._line(p.stdout)) for p in self.processes]
        finally:
            late.cancel()
        (loss, *_) = (rank["loss"] for rank in ranks if rank["loss"] is not None)
        self.losses.append(loss)
        if not self.off() < TOLERANCE:  # nor nan
            raise RuntimeError(
                f"{self.name} computes something else: its losses are {self.losses}, "
                f"a single process's {self.expected}"
            )
        return ranks

    def off(self) -> float:
        """How far losses are from those expected, at most."""
        pairs = zip(self.losses, self.expected or self.losses, strict=False)
        return max(abs(mine - exact) for mine, exact in pairs)

    def _line(self, printed: Iterator[str]) -> str:
        for line in printed:
            if line.startswith("{"):
                return line
        self.errors.seek(0)
        raise RuntimeError(f"{self.name} ended:\n{self.errors.read()[-4000:]}")

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()


def measure(
    names: Sequence[str], config: str, rounds: int, folder: Path
) -> Iterator[dict[str, dict]]:
    """All runs, a row of them after the other."""
    reference = Run(REFERENCE, config, folder / "reference")
    with reference.started():
        for _ in range(WARM + rounds + 1):
            reference("step")
    for row in dict.fromkeys(name.split("/")[0] for name in names):
        own = [name for name in names if name.startswith(f"{row}/")]
        results = measure_row(own, config, rounds, folder, reference.losses)
        yield {name: asdict(result) for name, result in results.items()}


def measure_row(
    names: Sequence[str],
    config: str,
    rounds: int,
    folder: Path,
    losses: Sequence[float],
) -> dict[str, Result]:
    """The runs, started and then in turn; who begins changes with the round."""
    runs = {name: Run(name, config, folder / name, losses) for name in names}
    results: dict[str, Result] = {}
    with ExitStack() as stack:
        for name, run in runs.items():
            results[name] = Result(*launch(run, stack))
            say(
                name, f"first steps {results[name].cold:.1f} {results[name].warm:.1f} s"
            )
        for number in range(-WARM, rounds):
            for name in list(names)[:: 1 if number % 2 else -1]:
                ranks = runs[name]("step")
                if number >= 0:
                    results[name].wall.append(ranks[0]["wall"])
                    results[name].cpu.append(sum(rank["cpu"] for rank in ranks))
        for name, run in runs.items():
            results[name].peak = max(rank["peak"] for rank in run("peak"))
            results[name].off = run.off()
            say(name, f"{median(results[name].wall):.3f} s a step")
    return results


def launch(run: Run, stack: ExitStack) -> tuple[float, float]:
    """Start a run, to end with the stack; seconds to its first step, cold and warm."""
    with ExitStack() as own:
        cold = own.enter_context(run.started())
        if not any(path.is_file() for path in run.folder.rglob("*")):
            # Another start would be like this one.
            stack.enter_context(own.pop_all())
            return cold, cold
    return cold, stack.enter_context(run.started())


def say(name: str, text: str) -> None:
    print(f"{name:26} {text}", file=sys.stderr, flush=True)


def selected(patterns: str) -> list[str]:
    """The runs that one of the comma-separated shell patterns names."""
    every = [f"{row}/{run}" for row, of in ROWS.items() for run in of.runs]
    globs = patterns.split(",")
    if chosen := [run for run in every if any(fnmatch(run, glob) for glob in globs)]:
        return chosen
    raise SystemExit(f"--only {patterns}: none of {', '.join(every)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", choices=CONFIGS, default="small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="*", help="runs, as 'ddp-2/*,pp-4/ours-*'")
    parser.add_argument(
        "--json", type=Path, help="what was measured, rows of before too"
    )
    parser.add_argument("--svg", type=Path, help="a file for a picture of it")
    options = parser.parse_args()
    names, runs = selected(options.only), known(options.json, options.config)
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(names, options.config, options.rounds, Path(folder)):
            of = next(iter(row)).split("/")[0]
            runs = {n: run for n, run in runs.items() if n.split("/")[0] != of} | row
            if options.json:
                options.json.write_text(report(runs, options.config), encoding="utf-8")
    print(CONFIGS[options.config], f"{options.rounds} rounds")
    print(run_table(runs), best_table(runs, options.config), sep="\n\n")
    if options.svg:
        options.svg.write_text(drawing(runs, options.config), encoding="utf-8")


def known(file: Path | None, config: str) -> dict[str, dict]:
    """What a file has of runs measured before."""
    data = json.loads(file.read_text()) if file and file.exists() else {}
    return data["runs"] if data.get("config") == config else {}


def report(runs: dict[str, dict], config: str) -> str:
    made = {"config": config, "torch": torch.__version__, "cores": os.cpu_count()}
    return json.dumps(made | {"runs": runs}, indent=1) + "\n"


if __name__ == "__main__":
    main()
