"""An export without what nobody reads of it, which took a third of its time.

For each node torch makes the text of all frames that are running, torch's own and their
source lines too, of which the last line of a user's is read, and notes what its tensor
says itself, and where numbers of rows come from; and for each stage of an export it
writes and compiles a forward, of which none is called.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any

import torch
from torch.export import _trace, exported_program
from torch.fx import proxy
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.utils._traceback import CapturedTraceback

from ...replaced import replaced
from ..forward.function_calls import checkpoint_number
from ..forward.user_frames import IN_CHECKPOINT, TORCH, is_users

FORWARD = "forward"
PYTHON = os.path.dirname(inspect.__file__) + os.sep
INSTALLED = ("site-packages", "dist-packages")
EXPORT = torch.export.export.__code__  # below it are no frames of a model


class UserFrames(CapturedTraceback):
    """Knows the frames outside of torch, without their texts; around them is one of the
    checkpoint that is running, whose line is its number."""

    @staticmethod
    def extract(**_: Any) -> UserFrames:
        return UserFrames(None)

    def summary(self) -> StackSummary:
        """The forwards that are running, of which alone torch takes note, and what the
        innermost one has called of its own folder: that is named so too."""
        running: list[FrameType] = []
        own = inspect.currentframe()
        frame = own and own.f_back  # a list of its own frame would hold itself
        del own
        while frame is not None and (code := frame.f_code) is not EXPORT:
            if not code.co_filename.startswith(TORCH):
                running.append(frame)
            frame = frame.f_back
        forwards = [i for i, f in enumerate(running) if f.f_code.co_name == FORWARD]
        kept = [_line_of(running[i]) for i in forwards]
        for frame in running[: forwards[0] if forwards else 0]:
            file = frame.f_code.co_filename
            if is_users(file) and _belongs(file, kept[0].filename):
                kept.insert(0, _line_of(frame))
                break
        if (number := checkpoint_number.get()) is not None:
            kept.append(_line(IN_CHECKPOINT, number))
        return StackSummary.from_list(kept[::-1])


def _line_of(frame: FrameType) -> FrameSummary:
    """The line that a frame is at, as one of a forward."""
    return _line(frame.f_code.co_filename, frame.f_lineno)


@cache
def _line(file: str, line: int) -> FrameSummary:
    return FrameSummary(file, line, FORWARD, lookup_line=False, line="")


def _belongs(file: str, to: str) -> bool:
    """Whether one file is of the folder of another, or both are a user's own; to our
    own loss, any is."""
    return not is_users(to) or folder_of(file) == folder_of(to)


@cache
def folder_of(file: str) -> str:
    """The folder of a file of Python's or of an installed package; "" of a user's
    own."""
    folder = os.path.dirname(file)
    installed = set(INSTALLED).intersection(file.split(os.sep))
    return folder if installed or file.startswith(PYTHON) else ""


@contextmanager
def lean_export() -> Iterator[None]:
    """Makes torch.export.export do less, for the same graph."""
    making = "_create_graph_module_for_export"
    with (
        replaced(proxy, "CapturedTraceback", UserFrames),
        replaced(proxy_tensor, "_extract_tensor_metadata", lambda tensor: None),
        replaced(_trace, "_replace_unbacked_bindings", lambda module: None),
        replaced(exported_program, making, _make_graph_module),
        _use_lazy_graph_module(True),
    ):
        yield
