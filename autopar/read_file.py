"""Reads files and variables that others write, with errors as text."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from autopar.passes.errors import AutoparError
from autopar.passes.ranges import RANKS, Range, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class EnvironmentVariableError(AutoparError):
    """A variable of the environment has a value that it may not have."""


def read_text(path: Path, error: type[AutoparError], fix: str = "") -> str:
    """The text of a file. Raises `error` where it cannot be read, or is none."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as cause:
        reason = cause.strerror or str(cause)
        raise error(f"cannot read '{path}': {reason}", fix=fix) from None
    except UnicodeDecodeError as cause:
        raise error(
            f"'{path}' is not text: byte {cause.start} is no UTF-8", fix=fix
        ) from None


def parse_toml(
    text: str, where: str, error: type[AutoparError], fix: str = ""
) -> dict[str, Any]:
    """Read TOML. Raises `error` for text that is none."""
    try:
        return tomllib.loads(text)
    except ValueError as cause:
        raise error(f"{where} is not TOML: {cause}", fix=fix) from None


def read_variable(name: str, usual: int, of: Range = RANKS) -> int:
    """A whole number of the environment, or the usual one where it is not set.

    Raises: EnvironmentVariableError.
    """
    written = os.environ.get(name)
    if written is None:
        return usual
    value = of.parse(written)
    if value is None:
        raise EnvironmentVariableError(
            f"the environment has {name}={shown(written)}, which is not {of}",
            fix=f"start by torchrun, which sets it, or: unset {name}",
        )
    return int(value)
