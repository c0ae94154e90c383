"""A file of options says what flags say, and flags win over it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from autopar.cli import main, parser
from autopar.commands.config_file import OWN, ConfigError, with_config
from autopar.read_file import parse_toml

LINE = ["plans/a", "--steps", "7", "--lr", "1e-05", "--data", "a.bin:0.7"]
LINE += ["--data", 'b "c".txt', "--resume", "--save", "runs", "--eval-fraction", "0.5"]
LINE += ["--precision", "bf16", "--memory", "2GiB", "--no-tf32"]


def parsed(*line: str) -> argparse.Namespace:
    given = parser().parse_args(["run", *line])
    given.argv = ["run", *line]
    return with_config(given.parser, given, line)


def values(arguments: argparse.Namespace) -> dict[str, object]:
    skipped = {*OWN, "parser", "argv", "command"}
    return {k: v for k, v in vars(arguments).items() if k not in skipped}


def write(folder: Path, text: str) -> str:
    (folder / "run.toml").write_text(text)
    return str(folder / "run.toml")


def test_what_is_printed_is_read_as_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in ([], LINE):
        assert main(["run", *line, "--print-config"]) == 0
        text = capsys.readouterr().out
        assert values(parsed("--config", write(tmp_path, text))) == values(
            parsed(*line)
        )


def test_each_option_is_there_with_its_default_and_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "steps = 7\n")
    assert main(["run", "--config", file, "--print-config"]) == 0
    text = capsys.readouterr().out
    assert "# steps of the optimizer (default: 20)\nsteps = 7\n" in text
    assert "(default: constant) [constant, cosine, linear, wsd]" in text.replace(
        "\n#", ""
    )
    names = {line.split(" = ")[0].removeprefix("# ") for line in text.splitlines()}
    assert set(values(parsed())) <= names
    without = "\n".join(  # each that is not given is there as a comment that would do
        line.removeprefix("# ") if line.startswith("# log_file = ") else line
        for line in text.splitlines()
    )
    assert parse_toml(without, "", ConfigError)["log_file"] == "FILE"


def test_flags_win(tmp_path: Path) -> None:
    text = 'plan = "a"\ndata = ["a.bin", "b.bin"]\nresume = true\nsteps = 5\n'
    text += 'lr = 0.5\ndevices = "4"\n'
    file = write(tmp_path, text)
    found = parsed("--config", file, "--data", "c.bin", "--no-resume", "--steps", "20")
    assert (found.plan, found.data, found.resume) == ("a", ("c.bin",), False)
    assert (found.steps, found.lr, found.devices) == (20, 0.5, "4")
    found = parsed("b", "--config", file, "--cluster", "c.toml")
    assert (found.plan, found.devices) == ("b", None)
    assert found.data == ("a.bin", "b.bin") and found.resume


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("step = 5", "'step', and there is no such option\n.*did you mean steps"),
        ("lr-schedule = 'wsd'", "did you mean lr_schedule"),
        ("model = 'm.py:gpt'", "'model', and there is no such option\n.*write plan ="),
        ("[training]\nsteps = 5", "'training', and there is no such option"),
        ("steps = 0", r"steps = 0: '0' is not a whole number from 1"),
        ("steps = 5.0", "steps = 5.0: '5.0' is not a whole number"),
        ("steps = true", "steps = True"),
        ("steps = [5]", r"steps = \[5\] is no single value"),
        ("resume = 1", "resume = 1\n.*give true or false"),
        ("lr_schedule = 'wds'", "use one of constant, cosine, linear, wsd"),
        ("data = []", "is empty"),
        ("data = ['']", "is empty"),
        ("data = [['a', 'b']]", "is no single value"),
        ("devices = '4'\ncluster = 'a'", "has both 'devices' and 'cluster'"),
        ("steps = ", "is not TOML"),
        ("config = 'b.toml'", "there is no such option"),
    ],
)
def test_a_file_that_says_what_no_flag_may(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        parsed("--config", write(tmp_path, text))


def test_a_run_of_nothing_and_a_file_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--config", write(tmp_path, "steps = 3")]) == 2
    assert "there is no plan and no model to run" in capsys.readouterr().err
    assert main(["run", "--config", str(tmp_path / "other.toml")]) == 2
    assert "autopar run --print-config" in capsys.readouterr().err
