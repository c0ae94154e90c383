"""An export without what nobody reads of it, which took a third of its time.

For each node torch makes the text of all frames that are running, torch's own and their
source lines too, of which the last line of a user's is read; and for each stage of an
export it writes and compiles a forward, of which none is called.
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

from torch.fx import proxy
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils._traceback import CapturedTraceback

from ...replaced import replaced
from ..forward.user_frames import TORCH, is_users

FORWARD = "forward"
PYTHON = os.path.dirname(inspect.__file__) + os.sep
INSTALLED = ("site-packages", "dist-packages")


class UserFrames(CapturedTraceback):
    """Knows the frames outside of torch, without their texts."""

    @staticmethod
    def extract(**_: Any) -> UserFrames:
        return UserFrames(None)

    def summary(self) -> StackSummary:
        """The forwards that are running, of which alone torch takes note, and what the
        innermost one has called of its own folder: that is named so too."""
        frames: list[tuple[str, int, str]] = []
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(TORCH):
                frames.append((code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        forwards = [i for i, (_, _, name) in enumerate(frames) if name == FORWARD]
        kept = [frames[i] for i in forwards]
        for file, line, _ in frames[: forwards[0] if forwards else 0]:
            if is_users(file) and _belongs(file, kept[0][0]):
                kept.insert(0, (file, line, FORWARD))
                break
        return StackSummary.from_list(
            [FrameSummary(*f, lookup_line=False, line="") for f in kept[::-1]]
        )


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
    frames = replaced(proxy, "CapturedTraceback", UserFrames)
    with frames, _use_lazy_graph_module(True):
        yield
