"""Reads logs of `autopar run --log-file`: JSON lines of steps and evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autopar.passes.errors import AutoparError


class LogError(AutoparError):
    """There is no such log, or it is no log of a run."""


def find_logs(folder: Path) -> list[Path]:
    """Returns the folder's *.jsonl files, sorted."""
    return sorted(folder.glob("*.jsonl")) if folder.is_dir() else []


def read_log(path: Path) -> list[dict[str, Any]]:
    """Rows by step; of a step that was made twice, after a crash, the later one. A last
    line that was cut off is left out. Raises: LogError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(
            f"cannot read the log '{path}': {error}",
            fix="give the file that autopar run --log-file wrote",
        ) from None
    rows: dict[tuple[int, bool], dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
            if number == len(lines):
                continue  # of a run that goes on, or crashed
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise LogError(
                f"line {number} of '{path}' is not a step of a run",
                fix="give the file that autopar run --log-file wrote",
            )
        rows[row["step"], "eval_loss" in row] = row
    return [rows[key] for key in sorted(rows)]
