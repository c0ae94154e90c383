"""What is being done is shown on stderr; with --json stdout is one JSON document."""

from __future__ import annotations

import io
import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from plans import model_file

from autopar import progress
from autopar.cli import COMMANDS, main
from autopar.progress import Progress, tell
from autopar.training.options import RunOptions
from autopar.training.reports import progress as training
from autopar.training.reports.metrics import Row

# Of each command but `run`, whose lines are one object each, and `demo`, a show.
LINES = {
    "plan": "{model} --devices 2xCPU --mesh dp=2 --zero 0 --no-op-shardings -o {new}",
    "compile": "{model} --plan {plan} -o {plan} --unproved",
    "explain": "{plan} --formulas",
    "simulate": "{plan} --trace {new}.json",
    "report": "{plan}",
    "inspect": "{plan}",
    "verify": "{plan}",
    "profile": "--show",
    "sample": "{runs} --prompt def --tokens 2",
    "export": "{runs} -o {new}.pt",
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn but by a test."""
    monkeypatch.setattr(progress, "TICK", 1000.0)
    monkeypatch.setenv("TERM", "xterm")


def test_a_line_is_live_on_a_terminal_and_cleared() -> None:
    shown = Terminal()
    with Progress("plan", shown) as line:
        tell("pricing", 1, 2)
        line.draw()
        tell("a" * 200)
        line.draw()
        print("a warning", file=sys.stderr)
        line.draw()
    first, long, cleared, rest, again, last, _ = shown.getvalue().split("\r")[1:]
    assert first == f"plan: pricing [{'#' * 10:<20}] 1 of 2  0 s"
    assert long == "plan: " + "a" * 92  # 98 characters: a full line would wrap
    assert cleared == last == " " * 98 and again == long
    assert rest == "a warning\n"


def test_elsewhere_what_takes_long_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    with Progress("plan", file) as line:
        tell("pricing", 1, 2)
    assert file.getvalue() == "" and not line.thread.is_alive()
    monkeypatch.setattr(progress, "TICK", 0.01)
    monkeypatch.setattr(progress, "PAUSE", 0.02)
    with Progress("plan", file) as line:
        while not file.getvalue():
            line.thread.join(0.01)
    assert file.getvalue().splitlines()[0] == "plan:  0 s"


def test_what_is_inside_names_the_line_and_an_error_ends_it() -> None:
    shown = Terminal()
    stderr = sys.stderr
    with pytest.raises(KeyError), Progress("verify", shown) as outer:
        with Progress("compile", shown) as inner:
            tell("a pass")
            assert outer.text() == "compile: a pass  0 s"
        assert outer.text() == "verify: a pass  0 s"
        assert Progress.shown is outer and not inner.thread.is_alive()
        raise KeyError
    assert Progress.shown is None and sys.stderr is stderr
    tell("nobody listens")


def test_a_command_says_that_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def imported(name: str) -> ModuleType:
        assert Progress.shown is not None
        told.append(Progress.shown.text())
        return import_module(name)

    monkeypatch.setattr("autopar.cli.import_module", imported)
    with pytest.raises(SystemExit):
        main(["inspect", "--help"])
    assert told == ["inspect: importing torch  0 s"] and Progress.shown is None


@pytest.mark.slow
def test_passes_and_phases_are_told(
    made: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Progress, "change", lambda _, phase, *__: told.append(phase))
    line = ["compile", made["model"], "--mesh", "tp=2", "-o", made["new"]]
    assert main(line) == 0
    assert main(["verify", made["new"]]) == 0
    passes = ["trace", "normalize", "propagate", "insert_collectives", "emit"]
    assert {f"{name} done" for name in passes} <= {*told}
    assert told.index("capturing the model") < told.index("trace done")
    assert told[-2:] == [
        "running the untouched model",
        "running 2 ranks in this process",
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model, a plan that was found and compiled, a checkpoint, a name to write."""
    folder = tmp_path_factory.mktemp("made")
    names = {name: str(folder / name) for name in ("plan", "single", "runs", "new")}
    names["model"] = model = model_file(folder).replace("small", "bytes_")
    file = Path(model.partition(":")[0])
    text = file.read_text().replace("vocab=64", "vocab=256")
    file.write_text(text.replace("def small", "def bytes_"))
    asked = ["--devices", "2xCPU", "--mesh", "dp=2", "--zero", "0", "--no-op-shardings"]
    assert main(["plan", model, *asked, "-o", names["plan"]]) == 0
    assert main(["compile", model, "--plan", names["plan"], "-o", names["plan"]]) == 0
    assert main(["compile", model, "--mesh", "", "-o", names["single"]]) == 0
    run = ["run", names["single"], "--data", "stdlib", "--steps", "1"]
    assert main([*run, "--save", names["runs"]]) == 0
    return names


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("command", LINES)
def test_with_json_stdout_is_one_document(
    command: str, made: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    line = [word.format(**made) for word in LINES[command].split()]
    assert main([command, *line, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)
    assert not said.err or command == "plan"


def test_every_command_with_a_result_speaks_json() -> None:
    assert {*LINES, "run", "demo"} == {*COMMANDS}


def test_a_run_leaves_lines_above_its_live_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, now = Terminal(), [100.0]
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setattr(
        "autopar.training.reports.progress.time.monotonic", lambda: now[0]
    )
    lines = training.Progress(RunOptions(steps=9), 0)
    row: Row = {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens_per_second": 1.0}
    for step, seconds in ((1, 0.0), (2, 1.0), (3, 1.0), (4, 0.5), (9, 0.2)):
        now[0] += seconds
        lines.write({**row, "step": step, "peak_memory": 1})
    kept = [line.rpartition("\r")[2] for line in shown.getvalue().split("\n")[:-1]]
    assert [line.split()[1] for line in kept] == ["1/9", "3/9", "9/9"]
    assert shown.getvalue().count("\rstep 2/9") == 1
