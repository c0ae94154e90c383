"""Starting ranks on this machine: `torchrun` on our own command, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NoReturn

from autopar.passes.ranges import RANKS

ROOT = Path(__file__).parents[3]  # of the checkout, or where we are installed
GRACE = 40  # seconds: torchrun itself waits up to 30 for ranks that it ends

# A step frees what the next one allocates: glibc gives none of it back to the system,
# which would clear the pages again (mallopt(3); 32 MiB is the most that every glibc
# takes for the first).
KEEPS_PAGES = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


def rank_threads() -> int:
    """Threads of a rank, as torchrun starts it: one, unless the user says more."""
    return int(RANKS.parse(os.environ.get("OMP_NUM_THREADS", "")) or 1)


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
    flags = ["--standalone", "--nproc-per-node", str(ranks)]
    return launch_by(flags, command, seconds, environment)


def launch_by(
    flags: Sequence[str],
    command: Sequence[str],
    seconds: float | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Does the same, with flags of torchrun."""
    line = [sys.executable, "-m", "autopar.runtime.launch.quiet_torchrun"]
    line += [*flags, "-m", "autopar", *command]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    whole = {
        **KEEPS_PAGES,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        # The processes share the cores: threads that wait must not spin.
        "OMP_NUM_THREADS": str(rank_threads()),
        "OMP_WAIT_POLICY": "PASSIVE",
        **environment,
    }
    with running(line, env=whole) as process:
        return process.wait(seconds)


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A torchrun at work, that ends, with its ranks, when the context does.

    options: of `subprocess.Popen`. It has a session of its own, so that Ctrl-C reaches
    us alone: told twice to end, torchrun may leave ranks behind.
    """
    with (
        _signals_raise(),
        subprocess.Popen(command, start_new_session=True, **options) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                _end(process)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let signals that end a process unwind it, so that it can end its ranks first.
    Who ignores one, as under nohup, still does."""
    asked = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in asked:
        signal.signal(number, _unwind)
    try:
        yield
    finally:
        for number in asked:
            signal.signal(number, signal.SIG_DFL)


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _end(process: subprocess.Popen[Any]) -> None:
    """Ask torchrun to end its ranks and itself, and wait until it did."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
