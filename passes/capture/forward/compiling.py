"""Answers `torch.compiler.is_compiling()` and `is_exporting()` within a captured
forward.

`torch.export` sets both. To torch's own code that is right, which goes ways then that
can be captured; but a user's model runs eagerly, and computes what it computes there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..forward.user_frames import TORCH, asked_by_user, at_work

ASKED = (torch.compiler.is_compiling, torch.compiler.is_exporting)
TOLD = "_model_is_told"  # beside the names of torch.compiler, as its functions read it
_model_is_told: object = False
# Where older names of these functions ask them.
OLDER = (f"{TORCH}_utils.py", f"{TORCH}_dynamo{os.sep}external_utils.py")


class Compiling:
    """told: the answer to the user's code. asked: the line that asked."""

    def __init__(self) -> None:
        self.told, self.asked = False, ""

    def __bool__(self) -> bool:
        if not asked_by_user(*OLDER):
            return True
        self.asked = self.asked or at_work()
        return self.told

    def remarks(self) -> tuple[str, ...]:
        """Remarks on a model that is captured as if it were compiled."""
        if not self.told:
            return ()
        text = f"forward is captured as it runs within torch.compile ({self.asked}): "
        return (f"{text}what it does otherwise no graph has",)

    @contextmanager
    def answers(self) -> Iterator[None]:
        """Answers `torch.compiler.is_compiling` and its like, also where these were
        imported before."""
        names = vars(torch.compiler)
        before = [ask.__code__ for ask in ASKED]
        names[TOLD] = self
        try:
            for ask in ASKED:
                ask.__code__ = _answer.__code__
            yield
        finally:
            for ask, code in zip(ASKED, before, strict=True):
                ask.__code__ = code
            del names[TOLD]


def _answer() -> bool:
    """Returns the answer as a bool, as callers use it as one."""
    return bool(_model_is_told)
