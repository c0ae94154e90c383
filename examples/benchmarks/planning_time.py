"""How long planning and compiling take, and how much memory: from nothing to what is
written.

    python -m examples.benchmarks.planning_time            # four models
    python -m examples.benchmarks.planning_time --compile  # of a mesh, and the proof
    python -m examples.benchmarks.planning_time --curve    # and layers, and devices

Each row is one process: it imports everything, builds the model on the meta device,
captures it, searches or compiles and proves, and writes the plan. Needs Linux (peak
RSS).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from autopar.reports.tables import Table

ROOT = Path(__file__).parents[2]
GPT = (
    "hf:gpt2?n_layer={layers},n_embd={width},n_head={heads},n_positions=2048,"
    "resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"
)


@dataclass(frozen=True)
class Case:
    """samples: of a step. target: seconds of the processor and GB that are wanted.
    mesh: to compile for; "" to plan."""

    title: str
    spec: str
    devices: int
    samples: int
    seq: int
    target: tuple[float, float] | None = None
    device: str = "A100-80GB"
    mesh: str = ""

    @property
    def command(self) -> list[str]:
        """The arguments of `autopar`, but for where it writes."""
        how = ["compile", "--meta", "--mesh", self.mesh] if self.mesh else ["plan"]
        sizes = ["--global-batch", str(self.samples), "--seq", str(self.seq)]
        return [*how, self.spec, "--devices", f"{self.devices}x{self.device}", *sizes]


def gpt(layers: int, width: int, heads: int) -> str:
    return GPT.format(layers=layers, width=width, heads=heads)


MODELS = (
    Case("GPT-2, 12 layers", "hf:gpt2", 8, 64, 1024, (5, 1)),
    Case("GPT-3 175B, 96 layers", "hf:gpt3-175b-like", 1024, 1536, 2048, (8, 1)),
    Case("GPT 1T, 128 layers", gpt(128, 25600, 160), 3072, 3072, 2048, (15, 1)),
    Case(
        "Llama 405B",
        "hf:meta-llama/Llama-3.1-405B",
        16384,
        128,
        131072,
        (30, 1),
        "H100",
    ),
)
COMPILED = (
    Case("GPT-2, 12 layers", "hf:gpt2", 8, 8, 1024, mesh="dp=4,tp=2"),
    Case("GPT-2, 48 layers", "hf:gpt2?n_layer=48", 8, 8, 1024, mesh="dp=4,tp=2"),
    Case(
        "Llama 70B, 80 layers",
        "hf:meta-llama/Llama-3.1-70B",
        64,
        64,
        4096,
        (20, 1),
        "H100",
        "dp=2,pp=4,tp=8",
    ),
    Case(
        "GPT-3 175B, 96 layers",
        "hf:gpt3-175b-like",
        1024,
        1536,
        2048,
        (10, 1),
        mesh="dp=16,pp=8,tp=8",
    ),
)
# A model of 12,288 wide layers, as GPT-3's.
DEPTHS = tuple(
    Case(f"{n} layers", gpt(n, 12288, 96), 1024, 1536, 2048) for n in (12, 24, 48, 96)
)
SIZES = tuple(
    Case(f"{n} devices", gpt(24, 2048, 16), n, max(512, n), 2048)
    for n in (8, 64, 512, 4096)
)


def measure(case: Case) -> tuple[object, ...]:
    """Wall seconds, seconds of the processor, and peak GB of one command."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autopar", *case.command]
        command += ["-o", f"{folder}/plan"]
        began = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment()
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"autopar {case.command[0]} failed for {case.title}")
    peak = usage.ru_maxrss / 1e6
    busy = usage.ru_utime + usage.ru_stime
    wanted = "" if case.target is None else "{} s, {} GB".format(*case.target)
    return case.title, case.devices, round(wall, 1), round(busy, 1), peak, wanted


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--curve", action="store_true", help="layers and devices too")
    parser.add_argument("--compile", action="store_true", help="compile, not plan")
    asked = parser.parse_args()
    cases = [*(COMPILED if asked.compile else MODELS)]
    cases += [*DEPTHS, *SIZES] if asked.curve else []
    rows = tuple(map(measure, cases))
    head = ("model", "devices", "seconds", "of processor", "peak GB", "target")
    load = f"load before {os.getloadavg()[0]:.1f} of {os.cpu_count()} processors"
    title = f"autopar {cases[0].command[0]}, from nothing to the written plan"
    print(Table(title, head, rows, (load,)))


if __name__ == "__main__":
    main()
