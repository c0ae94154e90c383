"""Flags of all commands."""

from __future__ import annotations

import argparse

from autopar.cli import parser
from autopar.commands.arguments import SEARCH
from autopar.commands.parser import Formatter, shown_default
from autopar.options import SEARCHED, options_of


def flags() -> dict[tuple[str, str], tuple[str, argparse.Action]]:
    """(command, name of the argument) -> (its help, it)."""
    (commands,) = (a.choices for a in parser()._actions if isinstance(a.choices, dict))
    return {
        (name, action.dest): (Formatter("")._get_help_string(action), action)
        for name, command in commands.items()
        for action in command.complete()._actions
        if action.option_strings and action.default != argparse.SUPPRESS
    }


def test_every_flag_says_what_it_is_and_what_holds_without_it() -> None:
    assert len(flags()) > 100
    for flag, (told, action) in flags().items():
        about, *defaults = told.split("(default: ")
        assert about.strip(), f"{flag} has no help"
        assert action.required or len(defaults) == 1, f"{flag} has not one default"
        text = shown_default(action.default)
        for default in defaults:
            assert not default.startswith(")"), flag
            assert text in ("none", "no") or default.startswith(text), flag


def test_what_a_planner_searches_for_and_nothing_else_says_so() -> None:
    searched = {
        flag for flag, (told, _) in flags().items() if f"(default: {SEARCH})" in told
    }
    names = options_of(SEARCHED)
    assert searched == {(c, name) for c in ("plan", "run") for name in names}
