"""The parser of the command line, which imports what a command needs when it is named.

`autopar --help` is printed without torch, which alone takes a second to import.
"""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from autopar.passes.errors import AutoparError


class UsageError(AutoparError):
    """A command line that argparse refuses."""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help that ends with what holds where a flag is left out."""

    def _get_help_string(self, action: argparse.Action) -> str:
        told = action.help or ""
        left_out = action.option_strings and not action.required
        if not left_out or "default: " in told or action.default == argparse.SUPPRESS:
            return told
        return f"{told} (default: {shown_default(action.default).replace('%', '%%')})"


def shown_default(value: Any) -> str:
    """The text of help for the value of a flag that is left out."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    value = " ".join(value) if isinstance(value, tuple) else value
    return "none" if value in (None, [], "") else str(value)


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line as all of our errors do.

    fill: adds the arguments of a command, and returns examples of it; called when the
    command is named.
    """

    def __init__(
        self, fill: Callable[[Parser], Sequence[str]] | None = None, **keywords: Any
    ) -> None:
        super().__init__(**{"formatter_class": Formatter, **keywords})
        self.fill = fill

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        is_command = self.fill is not None
        self.complete()
        known, others = super().parse_known_args(args, namespace)
        if others and is_command:
            self._refuse(others)
        return known, others

    def _refuse(self, others: Sequence[str]) -> NoReturn:
        """Raises UsageError for arguments that a command does not have."""
        flags = [*self._option_string_actions]
        slips = [one.partition("=")[0] for one in others if one.startswith("--")]
        close = [
            flag
            for slip in slips
            for flag in difflib.get_close_matches(slip, flags, n=2, cutoff=0.75)
            or [flag for flag in flags if flag.endswith(slip[1:])]
        ]
        meant = f"did you mean {' or '.join(close)}? " * bool(close)
        raise UsageError(
            f"{self.prog} does not take {' '.join(others)}",
            fix=f"{meant}see: {self.prog} --help",
        )

    def complete(self) -> Parser:
        """Returns the parser with its arguments."""
        if self.fill:
            fill, self.fill = self.fill, None
            self.give_examples(fill(self))
        return self

    def give_examples(self, lines: Sequence[str]) -> None:
        """End the help with command lines."""
        self.epilog = "examples:\n" + textwrap.indent("\n".join(lines), "  ")

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, fix=f"see: {self.prog} --help")
