"""What the options of all commands take: `type=` of argparse, with names and ranges.

An option of a number is named as its range in `passes.ranges`, which the Python API
checks too. argparse puts the option's name before what is said here.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.options import read_bytes
from passes.errors import AutoparError
from passes.ranges import RANGES, Range, shown

LONGEST = 4096  # characters of a value, bytes of a path
NAME = 255  # bytes of a name in a path


def number(name: str) -> Callable[[str], Any]:
    """A number in the range of that name."""
    return lambda written: _in_range(written, RANGES[name])


def numbers(of: Range) -> Callable[[str], tuple[int, ...]]:
    """Numbers in a range, with commas between."""

    def read(written: str) -> tuple[int, ...]:
        return tuple(_in_range(piece, of) for piece in text(written).split(","))

    return read


def text(written: str) -> str:
    """Text that is there, and that can be printed and stored."""
    if not written.strip():
        raise _refused(written, "empty: leave the option out, or give it a value")
    return text_or_nothing(written)


def text_or_nothing(written: str) -> str:
    """The same, or none: a mesh without axes is that of one rank."""
    if len(written) > LONGEST:
        raise _refused(written, f"longer than {LONGEST} characters")
    if not written.isprintable():  # nor are bytes that are no UTF-8
        raise _refused(written, "not text: give printable characters, as UTF-8")
    return written


def path(written: str) -> Path:
    """A path that a file could have; whether one has it is not looked at."""
    text(written)
    if any(len(os.fsencode(part)) > NAME for part in Path(written).parts):
        raise _refused(written, f"no path: names in it have at most {NAME} bytes")
    return Path(written)


def size(written: str) -> int:
    """Bytes, as `16GiB`, `70GB` or `8e9`."""
    try:
        return read_bytes(text(written))
    except AutoparError:
        wanted = f"{RANGES['memory']} of bytes, as 16GiB, 70GB or 8e9"
        raise _refused(written, f"not {wanted}") from None


def _in_range(written: str, of: Range) -> Any:
    value = of.parse(written)
    if value is None:
        raise _refused(written, f"not {of}")
    return value


def _refused(written: str, what: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{shown(written)} is {what}")
