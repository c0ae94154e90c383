"""One GPU, in under 8 minutes: what is right, how fast, and how well predicted.

    python examples/benchmarks/gpu.py --json gpu.json
    python examples/benchmarks/gpu.py --tiny          # the same, small, on the CPU

Needs nothing but torch, and pytest for the kernels' tests. Runs these; plans of 2 and
4 ranks, which share the device and talk by gloo, beside a single process; and trains
GPT-2 XL and a Llama of 1B under bfloat16: the untouched model as it is and by
torch.compile (of each block, and of all), and ours with both backends. Tokens a second,
MFU (the model's own operations over the peak) and memory stand beside what was
predicted before the run. Whatever finds no time or no memory is named, with the reason.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the examples are found from any directory

from examples.benchmarks.gpu_models import SIZES, TINY  # noqa: E402
from examples.benchmarks.gpu_runs import PLANS, WAYS, serve  # noqa: E402
from examples.benchmarks.processes import ENVIRONMENT, environments  # noqa: E402

BUDGET = 450.0  # seconds of all
KERNELS = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", "."]
KERNELS += ["-p", "no:cacheprovider", "tests/runtime/test_kernels.py"]
KERNELS_SECONDS = 90.0
# A fork of a process that may have looked for GPUs cannot use them.
_PROCESSES = mp.get_context("spawn" if torch.cuda.is_available() else "forkserver")
PRELOAD = ["examples.benchmarks.gpu_runs", "torch._dynamo", "torch.export._trace"]


@dataclass(frozen=True)
class Job:
    """What so many processes are to do, see `gpu_runs.serve`, in so many seconds."""

    task: tuple[Any, ...]
    seconds: float
    ranks: int = 1


@dataclass
class Done:
    """rows: what was said. why: it ended early, "" if it did not."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""


def jobs(tiny: bool, ways: list[str]) -> dict[str, Job]:
    """The jobs by name, the most important first."""
    named = {f"{n} ranks": Job(("ranks", tiny), 60, n) for n in PLANS}
    for name in SIZES:
        named[name] = Job(("speed", name, tiny, ways), 170)
    return named


def run(job: Job, seconds: float) -> Done:
    """Run a job for at most so many seconds, and give what it has said by then."""
    until, done = time.monotonic() + seconds, Done()
    readers: list[Connection] = []
    processes = []
    for own in environments(job.ranks):
        reader, writer = _PROCESSES.Pipe(duplex=False)
        process = _PROCESSES.Process(target=serve, args=(writer, own, job.task))
        process.start()
        writer.close()  # so that our end sees when the process is gone
        readers.append(reader)
        processes.append(process)
    while readers and not done.why:
        ready = wait(readers, max(0.0, until - time.monotonic()))
        if not ready:
            done.why = f"no time: it was given {seconds:.0f} s"
        for reader in ready:
            try:
                row = reader.recv()
            except EOFError:
                readers.remove(reader)
                continue
            print(row, file=sys.stderr, flush=True)
            if "failed" in row:
                done.why = f"it failed: {row['failed']}"
            else:
                done.rows.append(row)
    for process in processes:
        if done.why:
            process.kill()
        process.join()
        if process.exitcode and not done.why:
            done.why = f"it failed: a process ended with {process.exitcode}"
    return done


def run_kernels(tiny: bool) -> Done:
    if not find_spec("pytest"):
        return Done(why="pytest is not installed")
    command = KERNELS + ["-k", "sum_exp"] * tiny
    try:
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=KERNELS_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Done(why=f"no time: it was given {KERNELS_SECONDS:.0f} s")
    last = (ended.stdout.strip().splitlines() or [""])[-1]
    failed = f"it failed: {ended.stdout[-400:]}{ended.stderr[-400:]}"
    return Done([{"kernels": last}], failed if ended.returncode else "")


def tables(done: Mapping[str, Done], sizes: Mapping[str, Any]) -> str:
    plans = [row for job in done.values() for row in job.rows if "plan" in row]
    speeds = [row for name in sizes for row in speed_rows(done[name], sizes[name])]
    form = ("", "", ".0f", ".0f", ".1f", ".1f", ".1%", ".2f", ".2f", ".1f", ".2f")
    parts = [f"kernels: {row['kernels']}" for row in done["kernels"].rows]
    if plans:
        parts.append(tabulate(plans, headers="keys", floatfmt=".0e"))
    if speeds:
        parts.append(tabulate(speeds, headers="keys", floatfmt=form))
    return "\n\n".join(parts)


def speed_rows(done: Done, config: Any) -> list[dict[str, Any]]:
    """A line for each way to train a model that was measured."""
    measured = {row["way"]: row for row in done.rows if "seconds" in row}
    if not measured:
        return []
    name, paper = done.rows[0]["model"], done.rows[0]["predicted"]
    tokens = paper["samples"] * config.context
    compiled = [r["seconds"] for w, r in measured.items() if w.startswith("compile")]
    rows = []
    for way, row in measured.items():
        expected = paper["seconds"].get(way)
        mine, peak = way.startswith("ours"), paper["peak flops"]
        rows.append(
            {
                "model": name,
                "way": way,
                "tokens/s": tokens / row["seconds"],
                "predicted": expected and tokens / expected,
                "ms/step": 1e3 * row["seconds"],
                "predicted ": expected and 1e3 * expected,
                "MFU": peak and paper["flops"] / row["seconds"] / peak,
                "GiB": row["bytes"] / 2**30,
                "predicted  ": paper["bytes"] / 2**30 if mine else None,
                "first step s": row["first"],
                "of torch.compile": min(compiled) / row["seconds"]
                if compiled
                else None,
            }
        )
    return rows


def skipped(done: Mapping[str, Done], ways: Sequence[str]) -> list[str]:
    """Lines on what was not measured, and what is wrong."""
    reasons = []
    for name, job in done.items():
        told = [row["way"] for row in job.rows if "way" in row]
        late = [way for way in ways if way not in told] if name in SIZES else []
        if job.why:
            reasons.append(
                f"{name}: {job.why}{', before ' * bool(late)}{', '.join(late)}"
            )
        for row in job.rows:
            if "skipped" in row:
                reasons.append(f"{name}, {row['way']}: {row['skipped']}")
            if not row.get("equal", True):
                reasons.append(f"WRONG: {row['plan']} is not the single process")
    return reasons


def device_here() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small models, on the CPU")
    parser.add_argument("--ways", default=",".join(WAYS), help="to train the models")
    parser.add_argument("--json", type=Path, help="a file for what was measured")
    options = parser.parse_args()
    _PROCESSES.set_forkserver_preload(PRELOAD)
    if options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU\n  fix  --tiny runs the same on the CPU")
    ways, sizes = options.ways.split(","), TINY if options.tiny else SIZES
    began, done = time.perf_counter(), {"kernels": run_kernels(options.tiny)}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(ENVIRONMENT, TORCHINDUCTOR_CACHE_DIR=folder)
        for name, job in jobs(options.tiny, ways).items():
            left = BUDGET - (time.perf_counter() - began)
            most = left if options.tiny else min(left, job.seconds)
            done[name] = run(job, most) if left > 10 else Done(why="no time was left")
    print(
        f"{device_here()}, torch {torch.__version__}", tables(done, sizes), sep="\n\n"
    )
    if lines := skipped(done, ways):
        print("\nskipped:", *lines, sep="\n")
    if options.json:
        rows = {name: asdict(job) for name, job in done.items()}
        made = {"device": device_here(), "torch": torch.__version__}
        made |= {"seconds": time.perf_counter() - began, "jobs": rows}
        options.json.write_text(json.dumps(made, indent=1) + "\n")
    if any(job.why.startswith("it failed") for job in done.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
