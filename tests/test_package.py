"""The wheel: what is in it, what it says of itself, and that it works by itself."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
import setuptools

from autopar.version import VERSION

ROOT = Path(__file__).parents[1]
PARTS = ("autopar", "examples", "README.md", "LICENSE", "pyproject.toml", "setup.py")
BUILD = "import sys; from setuptools.build_meta import build_wheel as b; b(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as building leaves folders behind."""
    copy, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(
                ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / part, copy / part)
    line = [sys.executable, "-W", "ignore", "-c", BUILD, str(target)]
    built = subprocess.run(line, cwd=copy, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    [found] = target.glob("*.whl")
    return found


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith("dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


@pytest.mark.slow
def test_the_wheel_holds_all_that_runs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for folder in ("autopar", "autopar/passes")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted |= {f"autopar/examples/{path.name}" for path in ROOT.glob("examples/*.py")}
    assert names == wanted
    assert {"autopar/py.typed", "autopar/reports/html/assets/d3.min.js"} <= names


def test_what_the_wheel_says_of_itself(wheel: Path) -> None:
    told = metadata(wheel)
    assert (told["Name"], told["Version"]) == ("autopar", VERSION)
    assert "Typing :: Typed" in told.get_all("Classifier", [])
    assert {"data", "docs", "hf", "log", "test", "trainer"} == {
        *told.get_all("Provides-Extra", [])
    }
    assert "torch<2.16,>=2.11" in told.get_all("Requires-Dist", [])
    text = told.get_payload()
    assert isinstance(text, str) and text.startswith("# autopar")
    assert "## Install and see it" in text and "Long sequences and mixtures" in text
    assert re.findall(r"\]\((?!https?:)", text) == []  # no link to a file


@pytest.mark.parametrize(("there", "end"), [(None, "2.14"), ("2.15.0", "2.16")])
def test_a_checkout_keeps_the_torch_that_is_there(
    there: str | None, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        told = tmp_path / f"torch-{there}.dist-info" / "METADATA"
        told.parent.mkdir()
        told.write_text(f"Name: torch\nVersion: {there}\n")
    given: dict[str, list[str]] = {}
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path(str(ROOT / "setup.py"))
    assert given["install_requires"][0] == f"torch>=2.11,<{end}"


def test_extras_are_those_that_errors_name() -> None:
    table = re.search(
        r"^\[project.optional-dependencies\]$(.*?)^\[",
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert table
    extras = {*re.findall(r"^(\w+) = \[", table[1], re.MULTILINE)}
    named = {
        name
        for path in (ROOT / "autopar").rglob("*.py")
        for name in re.findall(r"autopar\[(\w+)\]", path.read_text())
    }
    assert named == extras - {"docs", "test"}


@pytest.mark.nightly  # a minute: torch is installed
@pytest.mark.timeout(900)
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    python, autopar = (str(tmp_path / "venv/bin" / n) for n in ("python", "autopar"))

    def run(*line: str) -> str:
        done = subprocess.run(
            line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    run(python, "-m", "pip", "install", "--quiet", str(wheel), "torch==2.13.*")
    assert run(autopar, "--version") == f"autopar {VERSION}\n"
    model = "autopar.examples.gpt:demo"
    assert "proved" in run(autopar, "compile", model, "--mesh", "tp=2", "-o", "plan")
    assert "PASSED" in run(autopar, "verify", "plan")
    assert run(autopar, "report", "plan").startswith("wrote plan.html")


@pytest.mark.nightly
def test_twine_takes_the_wheel(wheel: Path) -> None:
    pytest.importorskip("twine", reason="pip install twine")
    line = [sys.executable, "-m", "twine", "check", "--strict", str(wheel)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "PASSED" in done.stdout, done.stdout + done.stderr
