"""What help says, how little it imports, and that names of the API come when used."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from processes import ENVIRONMENT

import autopar
from autopar.cli import COMMANDS, EXAMPLES, parser


def imported_by(line: str) -> set[str]:
    """Top-level packages that are there after a line of Python."""
    line += "\nimport sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", line], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {*done.stdout.splitlines()[-1].split()}


def test_help_imports_nothing_large() -> None:
    line = "from autopar.cli import main\n"
    for asked in ("--help", "--version", "nope"):
        line += f"try: main(['{asked}'])\nexcept SystemExit: pass\n"
    assert {"torch", "numpy", "sympy", "networkx"}.isdisjoint(imported_by(line))


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_ends_with_two_examples_that_parse(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([command, "--help"] if command else ["--help"])
    text = capsys.readouterr().out
    _, _, told = text.partition("examples:\n")
    lines = [line.strip() for line in told.splitlines()]
    assert len(lines) == 2 and max(map(len, lines)) <= 83
    for line in lines:
        program, named, *rest = shlex.split(line)
        assert (program, command or named) == ("autopar", named)
        assert callable(parser().parse_args([named, *rest]).command)
    assert command or tuple(lines) == EXAMPLES


def test_names_of_the_api_are_those_that_a_type_checker_reads() -> None:
    tree = ast.parse(Path(autopar.__file__).read_text(encoding="utf-8"))
    [block] = [n for n in tree.body if isinstance(n, ast.If)]
    read = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(read) == autopar.__all__ and {*read} <= {*dir(autopar)}
    for name, module in read.items():
        assert getattr(autopar, name) is getattr(import_module(str(module)), name)
    with pytest.raises(AttributeError, match="'autopar' has no attribute 'nope'"):
        autopar.nope  # noqa: B018
