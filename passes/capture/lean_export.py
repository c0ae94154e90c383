"""An export without what nobody reads of it, which took a third of its time.

For each node torch makes the text of all frames that are running, torch's own and their
source lines too, of which the last line of a user's is read; and for each stage of an
export it writes and compiles a forward, of which none is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any

from torch.fx import proxy
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils._traceback import CapturedTraceback

from ..capture.user_frames import TORCH


class UserFrames(CapturedTraceback):
    """Knows the frames outside of torch, without their texts."""

    @staticmethod
    def extract(**_: Any) -> UserFrames:
        return UserFrames(None)

    def summary(self) -> StackSummary:
        frames: list[FrameSummary] = []
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(TORCH):
                place = (code.co_filename, frame.f_lineno, code.co_name)
                frames.append(FrameSummary(*place, lookup_line=False, line=""))
            frame = frame.f_back
        return StackSummary.from_list(frames[::-1])


@contextmanager
def lean_export() -> Iterator[None]:
    """Within, torch.export.export makes less; a program's graph is the same."""
    before = vars(proxy).get("CapturedTraceback")
    try:
        proxy.CapturedTraceback = UserFrames
        with _use_lazy_graph_module(True):
            yield
    finally:
        proxy.CapturedTraceback = before
