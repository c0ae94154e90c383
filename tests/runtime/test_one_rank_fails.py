"""What fails on one rank alone ends the run soon, with that rank's traceback, and the
others say which one it was: in a script that torchrun starts as in `autopar run`."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from plans import tiny_plan
from processes import ENVIRONMENT, torchrun

from autopar.runtime.launch.launch import running

BOUND, SOON = 240, 90  # seconds; what waits for a collective waits for ten minutes

# Appended to the model: rank 1 fails in its sixth update.
FAILS = """
import os, pathlib, signal, sys, threading, time
from torch.optim.optimizer import register_optimizer_step_post_hook

done = 0

def fail(optimizer, args, kwargs):
    global done
    done += 1
    if os.environ["RANK"] == "1" and done == 6:
        (pathlib.Path(__file__).parent / "failed").touch()
        {failure}

register_optimizer_step_post_hook(fail)
"""
SCRIPT = """
import sys
from contextlib import suppress
import torch
import autopar
from autopar.models.load import load_model
from autopar.plans.store import load_plan

stored = load_plan(sys.argv[1])
loaded = load_model(stored.model_spec, seed=stored.seed)
step = autopar.compile(loaded.model, stored.program.mesh, program=stored.program)
step.build(**loaded.batch)
optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
with suppress(StopIteration):
    for _ in range(1000):
        optimizer.zero_grad()
        step(**loaded.batch)
        optimizer.step()
{then}
"""
# What rank 1 does, and what is on the screen then: lines of rank 1, and of the others.
HANGS = "threading.Thread(target=time.sleep, args=[600]).start(); "
ERRORS = {
    "an error": ("1 / 0", "ZeroDivisionError: division by zero"),
    "one as of torch": ("raise RuntimeError('mine')", "RuntimeError: mine"),
    "memory": ("raise MemoryError('all of it')", "MemoryError: all of it"),
    "a thread goes on": (f"{HANGS}raise OSError('mine')", "OSError: mine"),
}
ENDS = {
    "exit": ("sys.exit(3)", "autopar: rank 1 ended while others still wait for it"),
    "killed": ("os.kill(os.getpid(), 9)", "Signal 9 (SIGKILL) received"),
    "early": ("raise StopIteration", "autopar: rank 1 ended while others still wait"),
}
ENDS_OF_RUN = {
    "exit": ("sys.exit(3)", "autopar: rank 1 failed: SystemExit: 3"),
    "killed": ("os.kill(os.getpid(), 9)", "Signal 9 (SIGKILL) received"),
    "interrupted": ("raise KeyboardInterrupt", "autopar: rank 1 failed: interrupted"),
}
MESHES = "dp=2", "tp=2", "pp=2"


def failing(folder: Path, mesh: str, failure: str) -> str:
    """The plan of a model whose training fails on rank 1."""
    plan = tiny_plan(folder, mesh=mesh)
    with (folder / "model.py").open("a") as model:
        model.write(FAILS.format(failure=failure))
    return plan


def script(folder: Path, then: str = "") -> str:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(then=then))
    return str(path)


def said_by(folder: Path, *command: str) -> str:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with torchrun(2, *command, cwd=folder, **pipes) as process:
        said, _ = process.communicate(timeout=BOUND)
    assert process.returncode != 0 and (folder / "failed").exists(), said
    assert time.time() - (folder / "failed").stat().st_mtime < SOON, said
    return said


def check_error(said: str, error: str) -> None:
    assert f"autopar: rank 1 failed: {error}\n" in said
    traceback = said[: said.index("ChildFailedError")]  # what follows is torchrun's
    assert "model.py" in traceback and f"{error}\n" in traceback
    assert "onnection" not in said  # nor "Connection closed by peer"


@pytest.mark.matrix(quick=0, daily=2)
@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("mesh", MESHES)
def test_an_error_in_a_script(name: str, mesh: str, tmp_path: Path) -> None:
    failure, error = ERRORS[name]
    plan = failing(tmp_path, mesh, failure)
    said = said_by(tmp_path, script(tmp_path), plan)
    check_error(said, error)
    _, _, cause = said.partition("Root Cause")
    assert "rank      : 1" in cause and f"{error}\n" in cause


@pytest.mark.matrix(quick=0, daily=2)
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("mesh", MESHES)
def test_an_end_in_a_script(name: str, mesh: str, tmp_path: Path) -> None:
    failure, expected = ENDS[name]
    plan = failing(tmp_path, mesh, failure)
    assert expected in said_by(tmp_path, script(tmp_path), plan)


@pytest.mark.slow
def test_a_rank_that_leaves_its_loop_early_meets_the_others(tmp_path: Path) -> None:
    plan = failing(tmp_path, "dp=2", "raise StopIteration")
    said = said_by(tmp_path, script(tmp_path, "step.state_dict()"), plan)
    assert "RanksDisagree: rank 0 steps, but rank 1 takes a state dict" in said
    assert "onnection" not in said


@pytest.mark.slow
def test_an_error_that_a_collective_hides(tmp_path: Path) -> None:
    """Rank 1 waits in it for rank 0, which waits for rank 1 in a step."""
    failure, error = ERRORS["an error"]
    plan = failing(tmp_path, "dp=2", failure)
    train = Path(script(tmp_path, "finally:\n    torch.distributed.barrier()"))
    text = train.read_text().replace("with suppress(StopIteration):", "try:")
    soon = "from autopar.runtime.launch import hidden_error\nhidden_error.LATE = 3.0\n"
    train.write_text(soon + text)
    check_error(said_by(tmp_path, str(train), plan), error)


@pytest.mark.matrix(quick=0, daily=1)
@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("mesh", MESHES)
def test_an_error_in_a_run(name: str, mesh: str, tmp_path: Path) -> None:
    failure, error = ERRORS[name]
    plan = failing(tmp_path, mesh, failure)
    check_error(said_by(tmp_path, "-m", "autopar", "run", plan), error)


@pytest.mark.matrix(quick=0, daily=1)
@pytest.mark.parametrize("name", ENDS_OF_RUN)
@pytest.mark.parametrize("mesh", MESHES)
def test_an_end_in_a_run(name: str, mesh: str, tmp_path: Path) -> None:
    failure, expected = ENDS_OF_RUN[name]
    plan = failing(tmp_path, mesh, failure)
    assert expected in said_by(tmp_path, "-m", "autopar", "run", plan)


@pytest.mark.slow
def test_a_rank_may_end_before_others_that_do_not_need_it(tmp_path: Path) -> None:
    plan = failing(tmp_path, "dp=2", "pass")
    train = Path(script(tmp_path, "import time; time.sleep(10 * step.comm.rank)"))
    train.write_text(train.read_text().replace("1000", "8"))
    with torchrun(2, str(train), plan, cwd=tmp_path) as process:
        assert process.wait(BOUND) == 0


def by_hand(folder: Path, *command: str) -> list[tuple[int, str]]:
    """Status and screen of two ranks that no launcher started: rank 0 has the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    line = [sys.executable, *command]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                running(line, env={**ENVIRONMENT, **told, "RANK": rank}, **pipes)
            )
            for rank in "01"
        ]
        said = [process.communicate(timeout=BOUND)[0] for process in ranks]
    return [(ranks[i].returncode, text) for i, text in enumerate(said)]


@pytest.mark.slow
def test_rank_0_keeps_its_store_until_others_ask_it_no_more(tmp_path: Path) -> None:
    plan = failing(tmp_path, "dp=2", "pass")
    train = Path(script(tmp_path, "import time; time.sleep(3 * step.comm.rank)"))
    train.write_text(train.read_text().replace("1000", "8"))
    for status, said in by_hand(tmp_path, str(train), plan):
        assert status == 0 and "TCPStore" not in said, said


@pytest.mark.slow
def test_an_error_of_the_rank_that_has_the_store(tmp_path: Path) -> None:
    plan = failing(tmp_path, "dp=2", "raise ValueError('mine')")
    model = tmp_path / "model.py"
    model.write_text(model.read_text().replace('== "1" and', '== "0" and'))
    (_, first), (status, second) = by_hand(tmp_path, script(tmp_path), plan)
    assert "ValueError: mine" in first and "model.py" in first
    assert second.strip() == "autopar: rank 0 failed: ValueError: mine"
    assert status != 0
