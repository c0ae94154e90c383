"""Whatever an option is given, the command line answers with text: never a traceback.

The options are those that the parsers have: a new one is tried without being listed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from plans import model_file, small_model, small_program
from processes import ENVIRONMENT

import autopar.cli
from autopar.cli import main, parser
from autopar.models.load import LoadedModel
from autopar.options import OPTIONS, usual
from autopar.passes.errors import AutoparError
from autopar.passes.ranges import RANGES
from autopar.plans.store import save_plan

LIMIT = 60  # seconds of a command: one that takes longer hangs
LONG = "x" * 5000
NUMBERS = ["-1", "0", "1.5", "nan", "inf", "-inf", "1e400", "0x10", "1_0", "9" * 5000]
NUMBERS += ["99999999999", "99999999999999999999", "1e-400", "\u0663"]
TEXTS = ["", " ", "x", ",", ":", "a=b", "\udcff", "a\0b", "a\nb", "4,", LONG, "é"]
MESHES = ["tp=0", "tp=-1", "tp=nan", "zz=2", "tp=99999999999", "tp=2,tp=2", "time=2"]
DEVICES = ["0xCPU", "4x", "99999999999xCPU", "2xNOPE", "-1xCPU", "xCPU"]
MODELS = ["hf:", "x.py:y", "no_such.module:f", "..:f", "os:path", "os:sep", "::"]
PATHS = ["/proc/none/x", "file", "folder", "folder/none/x", "file/x"]
ODD = [*NUMBERS, *TEXTS, *MESHES, *DEVICES, *MODELS, *PATHS]

# A line of each command that works, and in whose place an option cannot stand.
LINES = {
    "plan": ["MADE_UP", "--devices=2xCPU", "--global-batch=4"],
    "explain": ["planned"],
    "simulate": ["planned"],
    "report": ["planned", "-o=page.html"],
    "profile": ["--show"],
    "compile": ["MADE_UP", "--mesh=tp=2", "-o=out"],
    "inspect": ["compiled"],
    "verify": ["compiled"],
    "run": ["compiled", "--steps=1", "--data=synthetic"],
    "sample": ["runs", "--prompt=a", "--tokens=1"],
    "export": ["runs", "-o=weights.pt"],
    "demo": ["--steps=1"],
}
INSTEAD_OF = {"--cluster": "--devices", "--plan": "--mesh", "--ranks": "--show"}
LONG_WORK = (
    *("commands.compile.compile_offline", "commands.plan.capture_few_layers"),
    *("commands.profile.launch", "commands.profile.measure_here"),
    *("commands.demo.load_model", "commands.verify.verify", "training.run.train"),
    "commands.sample.sample_checkpoint",
)


class Reached(AutoparError):
    """Where the work would begin, every option has been looked at."""


def reached(*_: object, **__: object) -> NoReturn:
    raise Reached("the work begins")


@cache
def commands() -> dict[str, argparse.ArgumentParser]:
    choices = (a.choices for a in parser()._actions if a.dest == "==SUPPRESS==")
    found = next(choices)
    assert isinstance(found, dict) and len(found) > 5
    return {name: each.complete() for name, each in found.items()}


def options(command: str) -> list[argparse.Action]:
    """All that take a value."""
    actions = commands()[command]._actions
    return [a for a in actions if a.nargs != 0 and a.default != argparse.SUPPRESS]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a plan for it that is not compiled, one that is, and a checkpoint."""
    folder = tmp_path_factory.mktemp("odd")
    spec = model_file(folder)
    asked = ["--devices", "2xCPU", "--mesh", "dp=2", "--zero", "0", "--no-op-shardings"]
    assert main(["plan", spec, *asked, "-o", str(folder / "planned")]) == 0
    program = small_program("", 2, prove=True)
    plan = str(save_plan(program, folder / "compiled", spec))
    assert main(["run", plan, "--steps", "1", "--save", str(folder / "runs")]) == 0
    (folder / "file").write_text("\N{SNOWMAN}")
    (folder / "folder").mkdir()
    return folder


@pytest.fixture
def place(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder with all that, models that are made in no time, a limit of seconds."""
    for path in origin.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(autopar.cli, "parser", cache(parser))
    for name in ("compile", "plan"):
        monkeypatch.setattr(f"autopar.commands.{name}.load_model", loaded)
    before = signal.signal(signal.SIGALRM, too_late)
    yield tmp_path
    signal.signal(signal.SIGALRM, before)


def loaded(spec: str, **given: Any) -> LoadedModel:
    if spec == "MADE_UP":
        return LoadedModel(cached_model(), None, spec, vocab=16)
    return autopar.models.load.load_model(spec, **given)


cached_model = cache(small_model)


def too_late(*_: object) -> NoReturn:
    raise TimeoutError(f"it hangs: {LIMIT} s")


def line(command: str, action: argparse.Action, value: str) -> list[str]:
    """The command's line with this value of one option."""
    base = LINES[command]
    if not action.option_strings:
        return [command, *(x for x in base if x.startswith("-")), "--", value]
    name = action.option_strings[-1]
    left_out = (name, action.option_strings[0], INSTEAD_OF.get(name, name))
    kept = [x for x in base if x.partition("=")[0] not in left_out]
    return [command, *kept, f"{name}={value}"]


def answer(argv: list[str]) -> tuple[int, str]:
    """The status of a command, and what it says to stderr."""
    said, told = io.StringIO(), io.TextIOWrapper(io.BytesIO(), "utf-8")
    signal.alarm(LIMIT)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(told):
            status = main(argv)
            told.flush()
    finally:
        signal.alarm(0)
    return status, said.getvalue()


def fault(command: str, action: argparse.Action, value: str) -> str:
    """What is wrong with the answer to one value of an option; "" if nothing is."""
    argv = line(command, action, value)
    case = f"{command} {action.option_strings or action.dest} {value[:30]!r}: "
    try:
        status, said = answer(argv)
    except BaseException as error:
        return f"{case}{type(error).__name__}: {str(error)[:200]}"
    if status == 0:
        return ""
    if status != 2 or not said.startswith("autopar: "):
        return f"{case}status {status}, {said[:200]!r}"
    pieces = [piece for piece in re.split(r"[=:x]", value) if piece]
    pieces += [str(Path(value).parent)] if "/" in value else []
    names = {*action.option_strings, action.dest, str(action.metavar), f"'{value}'"}
    named = any(n in said for n in (*names, *pieces)) or "the work begins" in said
    return "" if named else f"{case}not named: {said[:200]!r}"


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("command", LINES)
def test_an_odd_value_is_refused_by_name(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LONG_WORK:
        monkeypatch.setattr(f"autopar.{name}", reached)
    faults = [fault(command, a, v) for a in options(command) for v in ODD]
    assert not any(faults), "\n".join(filter(None, faults))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", sorted(set(LINES) - {"demo"}))
def test_an_odd_value_is_refused_or_works(command: str, place: Path) -> None:
    faults = [fault(command, a, v) for a in options(command) for v in ODD]
    assert not any(faults), "\n".join(filter(None, faults))


def test_every_command_has_a_line() -> None:
    assert set(LINES) == set(commands())


def test_the_flags_of_compile_are_the_options_of_the_call() -> None:
    """With the same values where they are left out, but for microbatches."""
    asked = parser().parse_args(["compile", "m", "--mesh", "dp=2"])
    assert asked.microbatches is None
    for name in set(OPTIONS) - {"microbatches", "hints"}:
        assert getattr(asked, name) == usual(name), name
    assert asked.hints == [] and not usual("hints")


def test_a_number_is_refused_with_its_range(place: Path) -> None:
    """As are all: the names of ranges are those of options."""
    seen = set()
    for command in LINES:
        for action in options(command):
            if action.dest in RANGES and action.dest != "memory":
                seen.add(action.dest)
                _, said = answer(line(command, action, "nan"))
                name = "/".join(action.option_strings)
                wanted = f"autopar: argument {name}: 'nan' is not {RANGES[action.dest]}"
                assert said.startswith(wanted)
    assert seen == set(RANGES) - {"memory"}


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["run", "compiled", "--lr", "1e400"], {}),
        (["inspect", "\udcff\udcfe"], {}),
        (["run", "compiled"], {"WORLD_SIZE": "two"}),
        (["run", "compiled"], {"WORLD_SIZE": ""}),
        (["run", "compiled"], {"WORLD_SIZE": "1", "RANK": "7"}),
        (["profile", "--ranks", "1"], {"RANK": "-1"}),
        (["profile", "--ranks", "1"], {"RANK": "0"}),  # and nothing else of torchrun's
    ],
)
def test_an_odd_environment_is_refused(
    arguments: list[str],
    variables: dict[str, str],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status, told = answer(arguments)
    assert status == 2 and "\n  fix  " in told and told.startswith("autopar: ")


@pytest.mark.slow
def test_a_process_ends_with_text(origin: Path) -> None:
    """Of bytes that are no text, which are to be written to stderr."""
    command = [sys.executable, "-m", "autopar", "run", "compiled", "--save", b"\xff"]
    done = subprocess.run(
        command, env=ENVIRONMENT, cwd=origin, capture_output=True, timeout=120
    )
    told = done.stderr.decode()
    # On a busy machine progress stands before it.
    assert done.returncode == 2 and "  fix  " in told
    assert told.startswith("autopar: ") or "\nautopar: " in told
    assert "Traceback" not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache_home", ["relative", "/proc/none", "/dev/null", "\udcff"]
)
def test_a_cache_that_cannot_be_is_done_without(
    cache_home: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    status, told = answer(["compile", "model.py:small", "--mesh=tp=2", "-o", "out"])
    assert status == 0, told
    assert not (tmp_path / "relative").exists()
