"""Real ranks for tests: N processes with a gloo group, and nothing left of them after.

Limits of time only keep a hang from lasting: they are far above what a slow machine
needs, and below those of pytest, so that it is told which rank hangs. Processes are
forked from a server that has loaded what takes long to import, so one takes
milliseconds. (Forks of the test's own process hang once it used OpenMP.)
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
)
from datetime import timedelta
from io import StringIO
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.cli import main
from autopar.runtime.launch.launch import running

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
ENVIRONMENT |= {"PYTHONDONTWRITEBYTECODE": ""}  # or each process compiles it all again
_SERVER = mp.get_context("forkserver")
PRELOADED = [
    "autopar.compiler",
    "autopar.step",
    "autopar.verify",
    "pytest",
    # What is imported, in a second or two each, when something is first called:
    "torch._dynamo",  # by an optimizer
    "torch.distributed.tensor",  # by assert_close
    "torch.export._trace",  # by torch.export.export
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]
_SERVER.set_forkserver_preload(PRELOADED)


class RankFailed(Exception):
    """A rank raised, died, or was not done in time; the text has its traceback."""


def run_ranks(
    body: Callable[..., Any], world: int, *args: Any, seconds: float = 240
) -> list[Any]:
    """Run body(*args) in `world` ranks of a gloo group; give what they return, by rank.

    body, args and results are pickled, so body is a function of a module. Each rank
    has one thread, and warnings are errors in it. `seconds` bounds all of it, and each
    wait of a rank for another.
    Raises: RankFailed, of the rank that was the first to fail.
    """
    return _run(_run_rank, world, seconds, body, args)


def run_commands(
    world: int,
    command: Sequence[str],
    variables: Mapping[str, str],
    seconds: float = 240,
) -> list[tuple[int, str, str]]:
    """Run `autopar command` in `world` ranks that begin as torchrun's do, here and with
    these environment variables; give the status, stdout and stderr of each.
    Raises: RankFailed.
    """
    return _run(_run_command, world, seconds, command, dict(variables), os.getcwd())


def _run(target: Callable[..., None], world: int, seconds: float, *args: Any) -> Any:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends, processes = [], []
    try:
        for rank in range(world):
            ours, theirs = _SERVER.Pipe()
            process = _SERVER.Process(
                target=target,
                args=(theirs, rank, world, store.port, seconds, *args),
            )
            process.start()
            theirs.close()  # so that our end sees when the process is gone
            ends.append(ours)
            processes.append(process)
        results = collect(ends, time.monotonic() + seconds)
        for end in ends:
            end.send("done")
        for rank, process in enumerate(processes):
            process.join(seconds)
            if process.exitcode != 0:
                raise RankFailed(f"rank {rank} ended with {process.exitcode}")
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for end in ends:
            end.close()


def torchrun(
    ranks: int, *arguments: str, **options: Any
) -> AbstractContextManager[subprocess.Popen[str]]:
    """A context in which torchrun is at work on so many ranks. options: of Popen."""
    command = [*torchrun_command(ranks), *arguments]
    return running(command, env=ENVIRONMENT, text=True, **options)


def torchrun_command(ranks: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc-per-node", str(ranks)]


def output_of(command: Sequence[str], folder: Path) -> str:
    """What a command writes to stdout, once it has ended well. It runs in a folder."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with running(command, env=ENVIRONMENT, cwd=folder, text=True, **pipes) as process:
        text, said = process.communicate()
    assert process.returncode == 0, said
    return text


def rank_process(launcher: int, rank: int) -> int:
    """The process id of a rank that a launcher started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if int(parent) == launcher and f"RANK={rank}".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")


def collect(ends: list[Connection], deadline: float) -> list[Any]:
    """What each rank returns, by rank. deadline: by the monotonic clock, in seconds."""
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(ends)) if rank not in results]
            raise RankFailed(f"ranks {late} were not done in time")
        for end in ready:
            rank = ends.index(end)
            try:
                result, error = end.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if error:
                raise RankFailed(f"rank {rank} raised\n{error}")
            results[rank] = result
    return [results[rank] for rank in range(len(ends))]


def _run_rank(
    end: Connection,
    rank: int,
    world: int,
    port: int,
    seconds: float,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    _be_a_rank()
    warnings.simplefilter("error")
    timeout = timedelta(seconds=seconds)
    with _told(end, seconds) as results:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timeout
        )
        results.append(body(*args))


def _be_a_rank() -> None:
    gc.freeze()  # what is loaded holds no garbage
    gc.set_threshold(100_000, 50, 100)
    torch.set_num_threads(1)


@contextmanager
def _told(end: Connection, seconds: float) -> Iterator[list[Any]]:
    """A list for a rank's result, which is sent, as is an error in place of it."""
    results: list[Any] = []
    try:
        yield results
        end.send((*results, None))
    except BaseException:
        end.send((None, traceback.format_exc()))
    # A rank that leaves early would break the connections of those still at work.
    if end.poll(seconds) and dist.is_initialized():
        dist.destroy_process_group()


def _run_command(
    end: Connection,
    rank: int,
    world: int,
    port: int,
    seconds: float,
    command: Sequence[str],
    variables: Mapping[str, str],
    folder: str,
) -> None:
    _be_a_rank()
    os.chdir(folder)
    os.environ.clear()
    number, count = str(rank), str(world)
    os.environ.update(variables, RANK=number, LOCAL_RANK=number)
    os.environ.update(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with (
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as errors,
        _told(end, seconds) as results,
    ):
        results.append((main(command), out.getvalue(), errors.getvalue()))
