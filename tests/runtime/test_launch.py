"""Launchers end with the context they are in, and their ranks with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ENVIRONMENT

from autopar.runtime.launch.launch import launch, running

QUIET = "autopar.runtime.launch.quiet_torchrun"
RANK = """
import os, signal
os.write(1, b"%d\\n" % os.getpid())
{then}
"""


def script(folder: Path, then: str) -> str:
    """What a rank runs: it says its process id, without anything that takes time."""
    path = folder / "rank.py"
    path.write_text(RANK.format(then=then))
    return str(path)


def quiet(path: str) -> list[str]:
    start = [sys.executable, "-m", QUIET, "--standalone", "--nproc-per-node", "2"]
    return [*start, path]


def alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT])
def how(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal, handled as in a terminal: who runs the tests may ignore some."""
    number = request.param
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)
    yield number
    signal.signal(number, before)


@pytest.mark.slow
def test_no_rank_outlives_a_signal(tmp_path: Path, how: signal.Signals) -> None:
    """Whatever ends us, ranks are gone when we go on, and nothing is printed."""
    command = quiet(script(tmp_path, "signal.pause()"))
    ended = KeyboardInterrupt if how == signal.SIGINT else SystemExit
    before, ranks = signal.getsignal(how), list[int]()
    said = tmp_path / "said"
    with (
        said.open("w") as errors,
        pytest.raises(ended),
        running(
            command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        ranks += [int(process.stdout.readline()) for _ in range(2)]
        assert all(map(alive, ranks))
        signal.raise_signal(how)
    assert len(ranks) == 2 and not any(map(alive, ranks))
    assert said.read_text() == "" and signal.getsignal(how) is before


@pytest.mark.slow
def test_no_rank_outlives_its_time(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        launch(2, ["profile", "-o", str(tmp_path / "mine.json")], seconds=0)
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(tmp_path).encode() not in process.read_bytes()
        except OSError:
            continue  # it ended meanwhile


@pytest.mark.slow
def test_the_status_is_that_of_the_rank_that_failed(tmp_path: Path) -> None:
    then = "os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else signal.pause()"
    command = quiet(script(tmp_path, then))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with running(command, env=ENVIRONMENT, **pipes) as process:
        _, said = process.communicate()
    assert (process.returncode, said) == (128 + signal.SIGKILL, "")


@pytest.mark.slow
def test_a_launcher_ends_with_who_started_it(tmp_path: Path) -> None:
    """Also where that one cannot end it any more."""
    said = tmp_path / "ranks"
    then = f"open({str(said)!r}, 'a').write(str(os.getpid()) + ' '); signal.pause()"
    command = quiet(script(tmp_path, then))
    start = "import subprocess, sys; subprocess.run(sys.argv[1:], start_new_session=1)"
    with running([sys.executable, "-c", start, *command], env=ENVIRONMENT) as process:
        while not said.exists() or len(said.read_text().split()) < 2:
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
        ranks = [int(number) for number in said.read_text().split()]
        began = time.monotonic()
        while any(map(alive, ranks)):
            assert time.monotonic() - began < 30
            time.sleep(0.1)
