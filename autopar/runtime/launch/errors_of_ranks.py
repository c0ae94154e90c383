"""An error of a rank: whether another one may be its cause; telling torchrun of it."""

from __future__ import annotations

import traceback
from types import TracebackType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

# Modules in which a rank waits for others.
COMMUNICATION = ("torch.distributed.", "autopar.runtime.comm.")


def of_communication(error: BaseException) -> bool:
    """Whether an error may come from a peer that is gone or late: a RuntimeError, for
    gloo has no other, out of a call of torch.distributed."""
    if isinstance(error, dist.DistError):
        return True
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = (frame.f_globals.get("__name__", "") for frame in frames)
    waited = any(name.startswith(COMMUNICATION) for name in modules)
    return waited and isinstance(error, RuntimeError)


def record(error: BaseException, where: TracebackType | None) -> None:
    """Let torchrun know, which shows at its end what was the first to fail."""
    try:
        raise error
    except BaseException:
        error.__traceback__ = where  # as it was
        get_error_handler().record_exception(error)
