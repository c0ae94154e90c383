"""Flags of all commands."""

from __future__ import annotations

import argparse

from autopar.cli import parser
from autopar.commands.parser import Formatter


def test_every_flag_says_what_it_is_and_what_holds_without_it() -> None:
    whole = parser()
    (commands,) = (a.choices for a in whole._actions if isinstance(a.choices, dict))
    flags = {
        f"{name} {action.option_strings[-1]}": action
        for name, command in commands.items()
        for action in command.complete()._actions
        if action.option_strings and action.default != argparse.SUPPRESS
    }
    assert len(flags) > 100
    for flag, action in flags.items():
        told = Formatter("")._get_help_string(action)
        assert told.partition("(default")[0].strip(), f"{flag} has no help"
        assert action.required or "default: " in told, flag
