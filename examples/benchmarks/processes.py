"""Processes of a benchmark: all start alike, and none outlives the call."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from autopar.runtime.launch import running

ROOT = Path(__file__).parents[2]

# The allocator returns no pages to the system and threads do not spin while they wait.
# 32 MiB is the most that every glibc accepts for the first.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def run(command: Sequence[str], timeout: float) -> str:
    """What a command prints, run within the checkout. timeout: in seconds.

    Raises: RuntimeError with the end of what it says of its failure; TimeoutExpired.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with running(
        command,
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        printed, said = process.communicate(timeout=timeout)
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {process.returncode}:\n"
            f"{(said or printed)[-4000:]}"
        )
    return printed
