"""Folders of checkpoints: whatever is killed or damaged, a good one stays."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
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
from autopar.checkpoints.checkpoint_files import (
    MANIFEST,
    checksum,
    complete,
    find,
    latest,
)
from autopar.checkpoints.sole_writer import LOCK, sole_writer
from autopar.passes.errors import AutoparError
from autopar.passes.program import Program

# Every call that changes names or makes files, as Python's audit hooks see it.
CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def tiny() -> Case:
    return plain_gpt(layers=1, heads=2)


def small(program: Program | None = None) -> autopar.Step:
    return tiny().step(program)


def mark(step: autopar.Step, number: int) -> None:
    """Let the step be as after `number` steps, with values that tell."""
    step.executor.steps = number
    with torch.no_grad():
        for p in step.parameters():
            p.fill_(number)


def check(step: autopar.Step, folder: Path) -> list[int]:
    """Load every checkpoint that is there, and give their numbers of steps."""
    found = []
    for path in complete(folder):
        mark(step, -1)
        step.load(path)
        number = step.executor.steps
        assert path.name.startswith(f"step-{number:08d}")
        assert all(bool((p == number).all()) for p in step.parameters())
        found.append(number)
    return found


def die_at(call: int, folder: Path) -> None:
    """Kill this process by SIGKILL before its call number `call` in the folder."""
    calls = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal calls
        if event not in CALLS:
            return
        place = str(arguments[0])
        if event == "open" and not place.startswith(str(folder)):
            return
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1

    sys.addaudithook(hook)


def kill_everywhere(
    folder: Path, program: Program, again: bool
) -> tuple[int, list[list[int]]]:
    """Kill a save at each of its calls in turn, and look at what is there after it.

    again: the step was saved before, and is replaced. Returns how many calls there
    are, and the checkpoints after each kill.
    """
    dist.destroy_process_group()  # its threads would not survive a fork
    step, template = small(program), folder.with_name("template")
    mark(step, 1)
    step.save(template)
    if again:
        step.save(template)
    outcomes = []
    for call in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)
        mark(step, 1 if again else 2)
        child = os.fork()
        if child == 0:
            die_at(call, folder)
            step.save(folder, keep=1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        outcomes.append(check(step, folder))
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            return call, outcomes
        mark(step, 3)
        step.save(folder, keep=1)
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    raise AssertionError("a save has no end")


def kills(folder: Path, again: bool) -> tuple[int, list[list[int]]]:
    program = tiny().proved("tp=1")
    [found] = run_ranks(kill_everywhere, 1, folder / "runs", program, again)
    return found


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path: Path) -> None:
    calls, outcomes = kills(tmp_path, again=False)
    assert calls > 10
    assert outcomes[0] == [1] and outcomes[-1] == [2]
    # First the old one alone, from the rename on both, in the end the new one.
    assert sorted(outcomes) == outcomes and [1, 2] in outcomes
    assert all(outcomes)


@pytest.mark.slow
def test_a_kill_while_a_step_is_saved_again(tmp_path: Path) -> None:
    calls, outcomes = kills(tmp_path, again=True)
    assert calls > 10 and all(found == [1] for found in outcomes)


def die_as_rank_1(folder: Path, program: Program, call: int) -> None:
    step = small(program)
    if dist.get_rank() == 1:
        die_at(call, folder)
    mark(step, 2)
    step.save(folder)


@pytest.mark.slow
@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_rank_killed_during_a_save(tmp_path: Path, call: int) -> None:
    step = small()
    mark(step, 1)
    step.save(tmp_path)
    with pytest.raises(RankFailed):
        run_ranks(die_as_rank_1, 2, tmp_path, tiny().proved("dp=2"), call)
    assert check(step, tmp_path) == [1]


# --- which one, and how many -------------------------------------------------------


def test_the_newest_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = small()
    for number in (1, 2, 10):
        mark(step, number)
        step.save(tmp_path, keep=2)
    assert check(step, tmp_path) == [2, 10]
    assert latest(tmp_path) == find(tmp_path) == tmp_path / "step-00000010"
    assert find(tmp_path / "step-00000002") == tmp_path / "step-00000002"
    assert "is there too" not in caplog.text
    mark(step, 5)  # as after a load of step 2
    step.save(tmp_path, keep=1)
    assert check(step, tmp_path) == [5, 10]
    assert "step-00000010' is there too" in caplog.text
    with pytest.raises(AutoparError, match="keep=0"):
        step.save(tmp_path, keep=0)


def test_others_files_stay(tmp_path: Path) -> None:
    step = small()
    (tmp_path / "notes.partial").mkdir()
    (tmp_path / "step-00000001.partial").mkdir()
    step.save(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"notes.partial", "step-00000000"}


# --- damage ------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> tuple[autopar.Step, Path]:
    """A step, and the newer of two checkpoints of it."""
    step = small()
    for number in (1, 2):
        mark(step, number)
        path = step.save(tmp_path)
    mark(step, 7)
    return step, path


def refused(step: autopar.Step, path: Path, says: str) -> None:
    """Loading raises, names the one that is good, and changes nothing."""
    with pytest.raises(AutoparError, match=says) as error:
        step.load(path)
    assert "fix  load" in str(error.value) and "step-00000001" in str(error.value)
    assert step.executor.steps == 7
    assert all(bool((p == 7).all()) for p in step.parameters())


def test_a_flipped_bit(two: tuple[autopar.Step, Path]) -> None:
    step, path = two
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    refused(step, path, r"damaged: __0_0\.distcp is not what was written")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_lost_file(two: tuple[autopar.Step, Path], name: str) -> None:
    step, path = two
    (path / name).unlink()
    refused(step, path, f"damaged: {name}: No such file")


LISTED = json.dumps(
    {"format": 1, "autopar": "", "torch": "", "step": 2, "mesh": "", "aliases": {},
     "files": ["__0_0.distcp"]}
)  # fmt: skip


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', LISTED])
def test_a_bad_manifest(two: tuple[autopar.Step, Path], text: str) -> None:
    step, path = two
    (path / MANIFEST).write_text(text)
    refused(step, path, f"damaged: {MANIFEST} cannot be read")


def test_a_newer_format(two: tuple[autopar.Step, Path]) -> None:
    step, path = two
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(AutoparError, match="is of format 2, but this autopar reads"):
        step.load(path)
    assert step.executor.steps == 7


def test_no_checkpoint(tmp_path: Path) -> None:
    step = small()
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(AutoparError, match="no complete checkpoint in"):
            step.load(place)
    (tmp_path / "step-00000001.partial").mkdir()
    with pytest.raises(AutoparError, match="no complete checkpoint in"):
        step.load(tmp_path / "step-00000001.partial")


def test_a_step_that_is_not_compiled(tmp_path: Path) -> None:
    step = autopar.compile(plain_gpt(layers=1).model, "tp=1")
    for act in (step.save, step.load):
        with pytest.raises(AutoparError, match="not compiled yet"):
            act(tmp_path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AutoparError, match=r"File exists|Not a directory"):
        small().save(tmp_path / "file")


def fail_on_rank_1(folder: Path, program: Program) -> str:
    """What save raises on this rank when rank 1 has no room on its disk."""
    step = small(program)
    if dist.get_rank() == 1:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        dcp.FileSystemWriter.write_data = Mock(side_effect=full)
    with pytest.raises(AutoparError) as error:
        step.save(folder)
    return str(error.value)


@pytest.mark.slow
def test_a_full_disk_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for said in run_ranks(fail_on_rank_1, 2, tmp_path, tiny().proved("dp=2,tp=1")):
        assert "OSError on rank 1: [Errno 28] No space left" in said
    assert complete(tmp_path) == []


# --- a second writer ----------------------------------------------------------------

HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("process 7 on there", file=file, flush=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_writer_is_told_of_the_first(tmp_path: Path) -> None:
    step, line = small(), [sys.executable, "-c", HOLDS, str(tmp_path / LOCK)]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(AutoparError, match="another run: process 7 on there") as no:
            step.save(tmp_path)
        assert "a directory of its own" in no.value.fix
        assert complete(tmp_path) == []
    step.save(tmp_path)  # what a killed process leaves is no lock
    with sole_writer(tmp_path):
        step.save(tmp_path)  # a run that has it for as long as it lasts
        assert (tmp_path / LOCK).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


# --- files whose checksums were made anew -------------------------------------------


def without_training(metadata: Any) -> None:
    del metadata.state_dict_metadata["training"]


def without_keys(metadata: Any) -> None:
    metadata.planner_data = {}


def without_sizes(metadata: Any) -> None:
    names = metadata.state_dict_metadata
    names["model.tokens.weight"] = names["training"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_training, "it has no 'training'"),
        (without_keys, "metadata cannot be read: KeyError"),
        (without_sizes, "what it has of the model is no tensor"),
        (None, "metadata cannot be read"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(
    two: tuple[autopar.Step, Path], change: Any, says: str
) -> None:
    step, path = two
    file, manifest = path / ".metadata", path / MANIFEST
    metadata = pickle.loads(file.read_bytes())
    if change is not None:
        change(metadata)
    file.write_bytes(b"x" if change is None else pickle.dumps(metadata))
    data = json.loads(manifest.read_text())
    data["files"][file.name] = checksum(file)
    manifest.write_text(json.dumps(data))
    refused(step, path, f"is damaged: .*{says}")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("step", "x", "'step' in autopar.json is 'x', not a whole number"),
        ("files", {"../x": "y"}, "lists '../x'"),
        ("aliases", [], "'aliases' in autopar.json is"),
        ("more", 1, "unknown key 'more'"),
    ],
)
def test_what_a_manifest_must_not_say(
    two: tuple[autopar.Step, Path], key: str, value: Any, says: str
) -> None:
    step, path = two
    data = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**data, key: value}))
    refused(step, path, says)
