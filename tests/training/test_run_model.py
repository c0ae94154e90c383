"""`autopar run MODEL` plans, proves and compiles first, and starts again from that."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import tiny_file
from processes import ENVIRONMENT, torchrun

from autopar.cli import main
from autopar.passes.mesh import MeshError
from autopar.passes.plan import Plan
from autopar.training.run import check_world


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return tiny_file(Path(), 2, 16, 2, 8, 256)


def told(text: str) -> tuple[str, Path, str]:
    """The plan, its folder, and how it came there, of the two lines that a start
    prints."""
    found = re.search(r"^plan {4}(.*): .*\nfolder  (\S+) \((.*) in", text, re.M)
    assert found, text
    return found[1], Path(found[2]), found[3]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """How many ranks were started with which command line; none runs."""
    found: list[tuple[int, list[str]]] = []

    def launch(ranks: int, argv: list[str]) -> int:
        found.append((ranks, argv))
        return 0

    monkeypatch.setattr("autopar.commands.run.launch", launch)
    return found


@pytest.mark.slow
def test_ranks_are_started_on_a_folder_that_is_found_again(
    spec: str,
    started: list[tuple[int, list[str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["run", spec, "--mesh", "tp=2", "--zero", "0", "--microbatches", "2"]
    given = ["--steps", "3", "--seed", "7", "--resume", "--save", "x"]
    assert main([*line, *given, "--sample-prompt=- a"]) == 0
    told_plan, folder, how = told(capsys.readouterr().err)
    flags = ["--steps=3", "--seed=7", "--save=x", "--resume", "--sample-prompt=- a"]
    assert started == [(2, ["run", str(folder), *flags])]
    plan = Plan.from_json((folder / "plan.json").read_text())
    assert (str(plan.mesh), plan.microbatches, plan.zero) == ("tp=2", 2, 0)
    assert folder.parent == Path("plans") and folder.name.startswith("model-tiny-2xCPU")
    assert how == "planned, proved and compiled"
    written = (folder / "manifest.json").stat().st_mtime_ns
    assert main([*line, "--seed", "7", "--lr", "0.01"]) == 0
    assert told(capsys.readouterr().err) == (told_plan, folder, "found again")
    assert (folder / "manifest.json").stat().st_mtime_ns == written
    tiny_file(Path(), 3, 16, 2, 8, 256)
    assert main([*line, "--seed", "7"]) == 0
    assert told(capsys.readouterr().err)[1:] != (folder, "found again")


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["model.py:tiny", "--seq", "4"], "brings its own batch"),
        (["plan", "--devices", "4"], "--devices decides on a plan, but 'plan' is one"),
        (["plan", "--mesh", "tp=2"], "give a MODEL"),
        (["model.py:tiny", "--devices", "3", "--mesh", "tp=2"], "tp=2"),
    ],
)
def test_what_cannot_be_planned_is_said(
    spec: str, line: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *line]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_are_planned_for_and_trained(spec: str, tmp_path: Path) -> None:
    options = ("run", spec, "--devices", "2", "--steps", "3", "--data", "stdlib")
    command = ["python", "-m", "autopar", *options]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert told(done.stderr)[2] == "planned, proved and compiled"
    assert re.search(r"step 3/3  loss \d", done.stdout)


@pytest.mark.nightly
def test_the_first_rank_of_torchrun_plans(spec: str, tmp_path: Path) -> None:
    options = ("-m", "autopar", "run", spec, "--steps", "3", "--data", "stdlib")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with torchrun(2, *options, **pipes) as process:
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert told(err)[1].name.startswith("model-tiny-2xCPU")
    assert re.search(r"step 3/3  loss \d", out)


@pytest.mark.slow
def test_ranks_that_cannot_share_the_work_are_spare(
    spec: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nodes come and go; else it is an error. 5 do not divide 4 samples."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "5", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    made: list[Path] = []

    def run(prepare: Callable[[], Path], options: object) -> int:
        made.append(prepare())
        return 0

    monkeypatch.setattr("autopar.commands.run.run", run)
    assert main(["run", spec]) == 2
    assert "no mesh of 5 devices" in capsys.readouterr().err and not made
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert main(["run", spec]) == 0
    said = capsys.readouterr().err
    assert "spare   1 ranks wait: no mesh of 5 devices" in said
    assert check_world(made[0], 5, spare=True) == 4
    for world, spare in ((5, False), (3, True)):
        with pytest.raises(MeshError, match=f"for 4 ranks, but {world} processes run"):
            check_world(made[0], world, spare)
