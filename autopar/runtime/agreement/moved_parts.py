"""Collectives of a training loop's own, of what a step holds.

Loops for data parallel ranks send weights from rank 0 and sum gradients. A step has
summed them, and where ranks hold parts, those of different places would be mixed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from functools import cache, wraps
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor
from torch.distributed import distributed_c10d

from autopar.runtime.parameters.shard_gradient import ShardError, ShardGradient

# What writes into the tensor that it is given what comes of several ranks.
WRITES = frozenset({"all_reduce", "broadcast", "reduce", "scatter"})
OWN, TORCH, PASSES_ON = "autopar.", "torch.", ShardGradient.__module__


class Holder(Protocol):
    """cut_parameters: those that other ranks may have other parts of, or not at all.
    gradients: the plain ones, where ranks are several."""

    @property
    def cut_parameters(self) -> Collection[Tensor]: ...

    @property
    def gradients(self) -> Collection[Tensor]: ...


HOLDERS: WeakSet[Any] = WeakSet()


def watch_collectives(holder: Holder) -> None:
    """Refuses, from now on in this process, to write results of collectives into a
    step's gradients, values computed of them, and parts of parameters."""
    _look_at_collectives()
    HOLDERS.add(holder)


@cache
def _look_at_collectives() -> None:
    """torch's collectives have no hook: each looks by one function whether it was given
    a tensor, whatever name a loop calls it by."""
    is_tensor: Callable[[Any, str], None] = distributed_c10d._check_single_tensor

    @wraps(is_tensor)
    def checked(param: Any, param_name: str) -> None:
        is_tensor(param, param_name)
        frame = sys._getframe(1)
        if (name := frame.f_code.co_name) in WRITES:
            _check(param, name, frame)

    distributed_c10d._check_single_tensor = checked


def _check(x: Tensor, name: str, frame: FrameType | None) -> None:
    """Raises ShardError, with the loop's line."""
    # A gradient's class passes on what torch would call.
    while frame is not None and _module(frame).startswith((TORCH, PASSES_ON)):
        frame = frame.f_back
    if frame is None or _module(frame).startswith(OWN):
        return
    source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    memory = _memory(x)

    def is_one(of: Callable[[Holder], Collection[Tensor]]) -> bool:
        own = (_memory(tensor) for holder in HOLDERS for tensor in of(holder))
        return memory != 0 and memory in own

    if isinstance(x, ShardGradient) or is_one(lambda holder: holder.gradients):
        raise ShardError(
            f"{name} of a gradient: those of all samples are summed already, and other "
            "ranks may hold other parts of them",
            source=source,
            fix="leave it out; loss and gradients are those of the whole batch",
        )
    if is_one(lambda holder: holder.cut_parameters):
        raise ShardError(
            f"{name} of a parameter mixes parts: other ranks hold other parts of the "
            "parameters, and what several hold is alike already",
            source=source,
            fix="leave it out; to set weights: step.load_state_dict(state), alike on "
            "all ranks",
        )


def _memory(x: Tensor) -> int:
    """The address of its storage; 0 if empty, as some parts of short parameters."""
    return x.untyped_storage().data_ptr() if x.numel() else 0


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
