"""Seconds until a run has made its first step, with functions compiled before.

Compiles a plan, and starts `autopar run` on it: as written, compiled for the first
time, and again. Prints wall and CPU seconds of all processes, and the last as a
multiple of the first: processes that find compiled code start almost as fast.

    python examples/benchmarks/compiled_start.py --ranks 4
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

AUTOPAR = (sys.executable, "-m", "autopar")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="examples/gpt.py:demo")
    parser.add_argument("--mesh", default="pp=2,tp=2")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan"
        made = [*AUTOPAR, "compile", arguments.model, "--mesh", arguments.mesh]
        timed([*made, "-o", str(plan)])
        run = [sys.executable, "-m", "torch.distributed.run"]
        run += ["--nproc-per-node", str(arguments.ranks), "-m", "autopar", "run"]
        run += [str(plan), "--steps", "1", "--backend"]
        show("compiled for the first time", [timed([*run, "inductor"])])
        eager, again = [], []
        for _ in range(arguments.repeats):  # in turns: other work slows both
            eager.append(timed([*run, "eager"]))
            again.append(timed([*run, "inductor"]))
        show("as written", eager)
        show("compiled before", again)
        wall, cpu = (
            median(b[i] / a[i] for a, b in zip(eager, again, strict=True))
            for i in range(2)
        )
        print(f"compiled before, of as written: {wall:.2f} wall, {cpu:.2f} CPU")


def timed(command: list[str]) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of a command and all that it starts."""
    began, before = time.perf_counter(), _cpu()
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - began, _cpu() - before


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show(label: str, rows: list[tuple[float, float]]) -> None:
    wall, cpu = (median(row[i] for row in rows) for i in range(2))
    print(f"{label:28} {wall:6.1f} s wall {cpu:6.1f} s CPU", flush=True)


if __name__ == "__main__":
    main()
