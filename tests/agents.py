"""Several nodes on this machine: a torchrun for each, which meet by a port of loopback.

Ranks of a torchrun that was killed live on in sessions of their own: whatever happens,
none of them outlives the context.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from processes import ENVIRONMENT

from autopar.runtime.launch.launch import running


class Nodes:
    """Torchruns of one run, each with as many ranks; what they say is in files."""

    def __init__(self, folder: Path, nodes: str, ranks: int) -> None:
        # Of a store that lives as long as this: no torchrun takes the rendezvous along.
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self.folder = folder
        self.where = f"127.0.0.1:{self.store.port}"
        self.torchrun = [sys.executable, "-m", "torch.distributed.run"]
        self.torchrun += ["--nnodes", nodes, "--nproc-per-node", str(ranks)]
        self.torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.where]
        self.agents: list[subprocess.Popen[str]] = []

    @contextmanager
    def start(self, *command: str, by: Sequence[str] = ()) -> Iterator[int]:
        """A node more, by torchrun if nothing else is given; gives its number."""
        number = len(self.agents)
        whole = {**ENVIRONMENT, "AUTOPAR_TEST": str(self.folder)}
        with (
            (self.folder / f"out{number}").open("w") as out,
            (self.folder / f"err{number}").open("w") as errors,
            running(
                [*(by or self.torchrun), *command],
                env=whole,
                text=True,
                stdout=out,
                stderr=errors,
            ) as agent,
        ):
            self.agents.append(agent)
            yield number

    def said(self, number: int) -> tuple[str, str]:
        """What a torchrun and its ranks wrote: to stdout, and to stderr."""
        out, err = (self.folder / f"{kind}{number}" for kind in ("out", "err"))
        return out.read_text(), err.read_text()

    def processes(self) -> dict[int, dict[str, str]]:
        """All that are there, by process id: their environment."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                text = (folder / "environ").read_bytes().decode(errors="replace")
                told = dict(x.split("=", 1) for x in text.split("\0") if "=" in x)
                if told.get("AUTOPAR_TEST") == str(self.folder):
                    found[int(folder.name)] = told
        return found

    def kill_torchrun(self, number: int) -> None:
        """SIGKILL for the torchrun that an `autopar run` started."""
        for process, told in self.processes().items():
            parent = int((Path("/proc") / str(process) / "stat").read_text().split()[3])
            if parent == self.agents[number].pid and "RANK" not in told:
                os.kill(process, signal.SIGKILL)

    def kill(self, *ranks: int) -> None:
        """SIGKILL for these ranks, of those that are there."""
        for number, told in self.processes().items():
            if told.get("RANK") in map(str, ranks):
                os.kill(number, signal.SIGKILL)

    def end(self) -> None:
        for number in self.processes():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


@contextmanager
def nodes(folder: Path, count: str, ranks: int) -> Iterator[Nodes]:
    """Torchruns to be started, and nothing left of them after."""
    made = Nodes(folder, count, ranks)
    try:
        yield made
    finally:
        made.end()


def until(what: str, happens: Callable[[], bool], seconds: float) -> float:
    """Wait until something happens; returns the seconds that it took."""
    began = time.monotonic()
    while not happens():
        assert time.monotonic() - began < seconds, f"{what} not in {seconds} s"
        time.sleep(0.1)
    return time.monotonic() - began
