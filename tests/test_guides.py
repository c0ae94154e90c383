"""Commands of the guides exist, and their Python runs."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import output_of, torchrun_command

from autopar.cli import parser
from autopar.commands.config_file import ConfigError, with_config

GUIDES = sorted((Path(__file__).parents[1] / "examples" / "guides").glob("*.md"))
TEXTS = {guide.stem: guide.read_text() for guide in GUIDES}
COMMANDS = [
    (name, command)
    for name, text in TEXTS.items()
    for command in re.findall(r"^    (autopar .*?)(?: > .*)?$", text, re.M)
    if "..." not in command
]


@pytest.mark.parametrize(("guide", "command"), COMMANDS)
def test_commands_parse(guide: str, command: str) -> None:
    arguments = parser().parse_args(shlex.split(command, comments=True)[1:])
    assert callable(arguments.command)


def test_the_file_of_options_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", TEXTS["data"], re.DOTALL)
    (tmp_path / "run.toml").write_text(text)
    line = ["--config", str(tmp_path / "run.toml")]
    given = parser().parse_args(["run", *line])
    given.argv = ["run", *line]
    found = with_config(given.parser, given, line)
    assert (found.steps, found.devices, len(found.data)) == (10000, "4", 2)
    (tmp_path / "run.toml").write_text(text.replace("steps", "step"))
    with pytest.raises(ConfigError, match="did you mean steps"):
        with_config(given.parser, given, line)


@pytest.mark.nightly
def test_a_loop_of_ones_own_runs(tmp_path: Path) -> None:
    pytest.importorskip("torchdata", reason="needs autopar[data]")
    (script,) = re.findall(r"```python\n(.*?)```", TEXTS["data"], re.DOTALL)
    if find_spec("autopar.examples") is None:  # the checkout is not installed
        script = script.replace("autopar.examples", "examples")
    (tmp_path / "script.py").write_text(script)
    output_of([*torchrun_command(2), str(tmp_path / "script.py")], tmp_path)
    assert len(list((tmp_path / "runs").glob("step-*"))) == 2
