"""Runs work on rank 0 for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.passes.errors import AutoparError

T = TypeVar("T")


def on_first_rank(make: Callable[[], T]) -> T:
    """Returns what `make` returns on rank 0, or raises its error, on all ranks.

    Without other processes it is made here. The result is pickled on its way.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except AutoparError as error:
            box[0] = error
        except BaseException as error:
            # The others must not wait for what never comes.
            message = f"compiling failed on rank 0: {type(error).__name__}: {error}"
            dist.broadcast_object_list([AutoparError(message)], src=0)
            raise
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], AutoparError):
        raise box[0]
    made: T = box[0]
    return made
