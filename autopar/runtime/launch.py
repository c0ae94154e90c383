"""Starting ranks on this machine: `torchrun` on our own command, and its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import autopar

ROOT = Path(autopar.__file__).parents[1]  # of the checkout, or where we are installed
GRACE = 40  # seconds: torchrun itself waits up to 30 for ranks that it ends


def rank_threads() -> int:
    """Threads of a rank, as torchrun starts it: one, unless the user says more."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else 1


def launch(
    ranks: int,
    command: Sequence[str],
    seconds: float | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run `autopar command` on so many processes; returns the exit status.

    environment: what differs from this process's own. No rank outlives the call.
    Raises: subprocess.TimeoutExpired, after so many seconds.
    """
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += ["--nproc-per-node", str(ranks), "-m", "autopar", *command]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    whole = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        # The processes share the cores: threads that wait must not spin.
        "OMP_NUM_THREADS": str(rank_threads()),
        "OMP_WAIT_POLICY": "PASSIVE",
        **environment,
    }
    process = subprocess.Popen(line, env=whole)
    try:
        return process.wait(seconds)
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask torchrun to end its ranks and itself, and wait until it did."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
