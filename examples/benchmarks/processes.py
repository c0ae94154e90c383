"""Processes of a benchmark: all start alike, and none outlives the call."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.runtime.launch.launch import KEEPS_PAGES, running

ROOT = Path(__file__).parents[2]

# As `autopar run` has it, for both sides: threads do not spin while they wait.
ENVIRONMENT = {**KEEPS_PAGES, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def start(
    command: Sequence[str],
    variables: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> AbstractContextManager[subprocess.Popen[str]]:
    """A context in which a command is at work within the checkout.

    variables: more of its environment. options: of `subprocess.Popen`.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    modules = {"PYTHONPATH": os.pathsep.join(paths)}
    env = {**os.environ, **ENVIRONMENT, **modules, **variables}
    return running(command, cwd=ROOT, env=env, text=True, **options)


def environments(ranks: int) -> list[dict[str, str]]:
    """What each of so many ranks of this machine finds in its environment, as torchrun
    would set it; nothing where there is one."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [common | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(ranks)]


def run(command: Sequence[str], timeout: float) -> str:
    """What a command prints. timeout: in seconds.

    Raises: RuntimeError with the end of what it says of its failure; TimeoutExpired.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(command, **pipes) as process:
        printed, errors = process.communicate(timeout=timeout)
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {process.returncode}:\n"
            f"{(errors or printed)[-4000:]}"
        )
    return printed
