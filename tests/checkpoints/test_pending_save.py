"""Checkpoints that are written while training goes on: the same, or as if not begun."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import Case
from models import plain_gpt
from processes import RankFailed, run_ranks

import autopar
from autopar.checkpoints.checkpoint_files import complete
from autopar.checkpoints.pending_save import PendingSave
from autopar.passes.errors import AutoparError
from autopar.passes.program import Program

WRITE = dcp.FileSystemWriter.write_data


def tiny() -> Case:
    return plain_gpt(layers=1, heads=2)


def made(program: Program | None = None) -> tuple[autopar.Step, torch.optim.Optimizer]:
    """A step and its optimizer, which has state."""
    case = tiny()
    step = case.step(program)
    update = torch.optim.AdamW(step.parameters())
    step(**case.batch)
    update.step()
    return step, update


def contents(folder: Path) -> dict[str, bytes]:
    """Reads the files of values; DCP's metadata have another number each time."""
    return {path.name: path.read_bytes() for path in folder.glob("*.distcp")}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before this is set."""
    event = threading.Event()

    def write(*given: Any) -> Any:
        assert event.wait(60)
        return WRITE(*given)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write)
    return event


def test_what_is_written_is_what_was_there(
    tmp_path: Path, gate: threading.Event
) -> None:
    """It is as of the save, whatever is trained meanwhile; and counts when it is on
    disk."""
    step, update = made()
    pending = step.save(tmp_path / "later", update, extra=7, asynchronous=True)
    assert isinstance(pending, PendingSave) and not pending.done()
    assert complete(tmp_path / "later") == []
    kept = {n: p.detach().clone() for n, p in step.named_parameters()}
    state = {p: {k: v.clone() for k, v in s.items()} for p, s in update.state.items()}
    step(**tiny().batch)
    update.step()
    gate.set()
    later = pending.result(60)
    step.executor.steps -= 1
    with torch.no_grad():
        for name, p in step.named_parameters():
            p.copy_(kept[name])
            update.state[p].update(state[p])
    at_once = step.save(tmp_path / "at once", update, extra=7)
    assert isinstance(at_once, Path) and later.name == at_once.name
    assert contents(later) and contents(later) == contents(at_once)
    assert [path.name for path in (tmp_path / "later").iterdir()] == [later.name]


def test_one_is_written_at_a_time(tmp_path: Path, gate: threading.Event) -> None:
    step, update = made()
    first = step.save(tmp_path, update, asynchronous=True)
    threading.Timer(0.2, gate.set).start()
    step.executor.steps += 1
    second = step.save(tmp_path, update, asynchronous=True, keep=1)
    assert isinstance(first, PendingSave) and first.done()
    step.finish_saving()
    assert isinstance(second, PendingSave)
    assert complete(tmp_path) == [second.result()]


@pytest.mark.parametrize("after", ["step", "save", "result"])
def test_a_full_disk_is_told_by_what_comes_next(
    tmp_path: Path, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, update = made()
    good = step.save(tmp_path, update)
    step.executor.steps += 1
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", Mock(side_effect=full))
    pending = step.save(tmp_path, update, asynchronous=True)
    monkeypatch.undo()
    assert isinstance(pending, PendingSave)
    pending._thread.join(60)
    following: dict[str, Callable[[], object]] = {
        "step": lambda: step(**tiny().batch),
        "save": lambda: step.save(tmp_path, update),
        "result": pending.result,
    }
    with pytest.raises(AutoparError, match="No space left on device"):
        following[after]()
    assert complete(tmp_path) == [good]
    if after != "result":
        following[after]()  # told once


def save_on_ranks(folder: Path, program: Program, fails: str) -> str:
    """What a later step raises on this rank, if rank 1 fails or dies while it writes;
    else the path of the checkpoint."""
    step, update = made(program)
    step.save(folder, update)
    step.executor.steps += 1
    if fails and dist.get_rank() == 1:

        def write(*_: Any) -> Any:
            if fails == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        dcp.FileSystemWriter.write_data = write
    pending = step.save(folder, update, asynchronous=True)
    assert isinstance(pending, PendingSave)
    if not fails:
        return str(pending.result(60))
    try:
        for _ in range(600):
            step(**tiny().batch)
            time.sleep(0.05)
    except AutoparError as error:
        return str(error)
    raise AssertionError("nobody was told")


@pytest.mark.slow
def test_ranks_write_together(tmp_path: Path) -> None:
    program = tiny().proved("dp=2", zero=1)
    found = run_ranks(save_on_ranks, 2, tmp_path, program, "")
    assert found == [str(path) for path in complete(tmp_path)[-1:]] * 2
    assert len(complete(tmp_path)) == 2
    step, update = made()
    step.load(found[0], update)


@pytest.mark.slow
def test_a_rank_without_room_is_told_of_by_all(tmp_path: Path) -> None:
    program = tiny().proved("dp=2", zero=1)
    for said in run_ranks(save_on_ranks, 2, tmp_path, program, "full"):
        assert "OSError on rank 1: [Errno 28] No space left" in said
    assert len(complete(tmp_path)) == 1


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_the_older_one(tmp_path: Path) -> None:
    program = tiny().proved("dp=2", zero=1)
    with pytest.raises(RankFailed):
        run_ranks(save_on_ranks, 2, tmp_path, program, "dies")
    [older] = complete(tmp_path)
    assert (tmp_path / "step-00000002.partial").exists()
    step, update = made()
    step.load(tmp_path, update)
    assert step.executor.steps == 1 and older.name == "step-00000001"
