"""The line of the user's source that is at work: outside of torch and this project."""

from __future__ import annotations

import dis
import inspect
import os
from itertools import islice
from types import FrameType, TracebackType
from typing import Any

import torch
import typing_extensions

Place = tuple[Any, Any]  # a code, and where in it
JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
TORCH = os.path.dirname(torch.__file__) + os.sep
# The folder of `passes`, and of what it is a part of.
OURS = os.path.abspath(os.path.join(__file__, *[".."] * 4)) + os.sep
# What torch calls deprecated is called from a wrapper of this file.
WRAPS = typing_extensions.__file__
# Methods of tensors that Python has, and what hands calls of them to modes.
HANDS_ON = (OURS, f"{TORCH}_tensor.py", f"{TORCH}overrides.py")
IN_CHECKPOINT = "<checkpoint>"  # a file that is none: its line is a checkpoint's number
# Of what is typed in, by a shell of Python, of IPython, or `python -c`; all else that
# is in brackets is made by programs.
TYPED = ("<stdin>", "<string>", "<console>", "<python-input", "<ipython-input")


def is_users(file: str) -> bool:
    """Whether a file may be a user's."""
    return is_written(file) and not file.startswith(OURS)


def is_written(file: str) -> bool:
    """Whether code of a file is a user's or this project's own."""
    return file.startswith(TYPED) or not file.startswith((TORCH, WRAPS, "<"))


def asked_by_user(*also: str) -> bool:
    """Whether a call that this project handles is of a user's own code, not of
    torch's. also: more files that only hand it on."""
    frame: FrameType | None = inspect.currentframe()
    between = (*HANDS_ON, *also)
    while frame is not None and frame.f_code.co_filename.startswith(between):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def raised_at(error: BaseException) -> str:
    """`file:line` of the innermost frame of a user in a traceback, or ""."""
    line: str = ""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_users(file):
            line = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def raised_by_user(error: BaseException) -> bool:
    """Whether a `raise` or an `assert` of a user's own raised it, or was about to when
    what it says of the error raised another."""
    trace = error.__traceback__
    innermost: TracebackType | None = None
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            innermost = trace
        trace = trace.tb_next
    if innermost is None:
        return False
    for step in dis.get_instructions(innermost.tb_frame.f_code):
        if step.offset < innermost.tb_lasti:
            continue
        if step.opname == "RAISE_VARARGS":
            return True
        if step.opcode in JUMPS or step.opname.startswith(("RETURN", "YIELD")):
            return False
    return False


def place_at_work() -> Place:
    """The code of the innermost frame of a user that is running, and where in it: by
    lines and columns, as Python 3.11 goes another way the more often it was there."""
    frame = _running()
    if frame is None:
        return None, 0
    place: Any = frame.f_lasti
    if hasattr(frame.f_code, "co_positions"):
        positions = frame.f_code.co_positions()
        lines = next(islice(positions, place // 2, None))
        place = place if None in lines else lines
    return frame.f_code, place


def at_work() -> str:
    """`file:line` of the innermost frame of a user that is running, or ""."""
    frame = _running()
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def words_at_work() -> tuple[str, ...]:
    """The names that the function of that frame uses."""
    frame = _running()
    if frame is None:
        return ()
    code = frame.f_code
    return (code.co_name, *code.co_names, *code.co_varnames)


def _running() -> FrameType | None:
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
