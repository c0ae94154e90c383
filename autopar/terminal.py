"""The terminal: its width, and whether it shows colours."""

from __future__ import annotations

import os
import shlex
import shutil
import textwrap
from typing import TextIO

WIDTH = 99  # characters of a line, where there is no terminal
LEAST = 20  # however narrow a terminal says it is
STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}


def width() -> int:
    """Characters of a line: COLUMNS, else the terminal's of stdout, else WIDTH."""
    return max(LEAST, shutil.get_terminal_size((WIDTH, 24)).columns)


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can rewrite a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str, stream: TextIO) -> str:
    """The text, in a style where the stream is a terminal that shows it.

    style: a name of STYLES. NO_COLOR, if it is not empty, turns styles off
    (https://no-color.org).
    """
    if not text or os.environ.get("NO_COLOR") or not is_terminal(stream):
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def command(*words: object) -> str:
    """A command line to copy, quoted for a shell."""
    return shlex.join(map(str, words))


def wrap(text: str) -> str:
    """Lines no wider than the terminal; those after the first are indented."""
    return textwrap.fill(
        text,
        width(),
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
