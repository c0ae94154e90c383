"""The README's Python runs, and its commands exist."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import output_of, torchrun_command

from autopar.cli import parser

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SCRIPTS = [block for block in BLOCKS if "import autopar" in block]
COMMANDS = re.findall(r"^    (?:torchrun .* -m )?(autopar .*?)(?:  #.*)?$", TEXT, re.M)


def test_the_readme_has_scripts_and_commands() -> None:
    assert len(SCRIPTS) == 2 and len(COMMANDS) >= 5


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    arguments = parser().parse_args(shlex.split(command)[1:])
    assert callable(arguments.command)


def test_the_layer_is_that_of_the_example() -> None:
    source = (ROOT / "examples" / "gpt.py").read_text()
    layer = next(block for block in BLOCKS if "class Attention" in block)
    for line in layer.splitlines():
        if "=" in line and "attention(" not in line:
            assert line.strip() in source


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=["torchrun", "offline"])
def test_scripts_run(script: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    if find_spec("autopar.examples") is None:  # the checkout is not installed
        script = script.replace("autopar.examples", "examples")
    path.write_text(script)
    command = [sys.executable, str(path)]
    if "step(" in script:
        command = [*torchrun_command(4), str(path)]
    output_of(command, tmp_path)
    assert (tmp_path / "model.pt").is_file() == ("torch.save" in script)
