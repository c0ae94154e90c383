"""What is printed fits the terminal, and has colours where it shows them."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pytest
from plans import small_program

from autopar.plans.store import PlanDirectoryError, load_plan
from autopar.reports.inspection import report
from autopar.reports.tables import Table
from autopar.terminal import WIDTH, command, styled, width

TABLE = Table(
    "A title of several words, which is wider than some of the terminals below are",
    ("name", "what is told of it", "number"),
    (("transformer.h.0.attn.c_attn.weight", "word " * 40, 12345678),) * 2,
    ("A note, as long as the title is, that has to be wrapped where it is too long.",),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [44, 71, 99, 300])
def test_tables_are_as_wide_as_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    texts = [str(TABLE), *([report(small_program())] if columns > 70 else [])]
    for text in texts:
        assert max(map(len, text.splitlines())) <= columns
    assert str(TABLE).count("12,345,678") == 2  # numbers stay whole
    if columns > 44:  # as do words
        assert str(TABLE).count("transformer.h.0.attn.c_attn.weight") == 2


def test_without_a_terminal_lines_have_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.__stdout__", None)
    assert width() == WIDTH
    monkeypatch.setenv("COLUMNS", "1")
    assert width() > 1


def test_colours_are_of_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, shown = io.StringIO(), Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR")
    assert styled("x", "red", shown) == "\x1b[31mx\x1b[0m"
    assert styled("x", "red", plain) == "x"
    monkeypatch.setattr("sys.stdout", shown)
    assert str(TABLE).startswith("\x1b[1mA title")
    monkeypatch.setenv("TERM", "dumb")
    assert styled("x", "red", shown) == "x" and "\x1b" not in str(TABLE)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("x", "red", shown) == "x" and "\x1b" not in str(TABLE)


def test_printed_commands_are_quoted_for_a_shell() -> None:
    words = ("autopar", "compile", "hf:gpt2?n_layer=4", "-o", Path("a plan"))
    assert command(*words) == "autopar compile 'hf:gpt2?n_layer=4' -o 'a plan'"
    assert shlex.split(command(*words)) == [*map(str, words)]
    with pytest.raises(PlanDirectoryError, match=r"-o '.*a plan'$"):
        load_plan(Path("no") / "a plan")
