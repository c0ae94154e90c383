"""Collectives that forward calls itself, as models written for Megatron's ranks do: in
a group of one rank each leaves what it is called with. In others it would be run by
ranks that hold something else than it was written for, and is refused.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import CaptureError
from ..forward.user_frames import at_work

# What is written in place, and of what, where there is one rank.
WRITES = {
    "all_gather": ("tensor_list", "tensor"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "all_gather_single": ("output_tensor", "input_tensor"),
    "all_reduce": None,
    "all_reduce_coalesced": None,
    "all_to_all": ("output_tensor_list", "input_tensor_list"),
    "all_to_all_single": ("output", "input"),
    "broadcast": None,
    "gather": ("gather_list", "tensor"),
    "reduce": None,
    "reduce_scatter": ("output", "input_list"),
    "reduce_scatter_single": ("output", "input"),
    "reduce_scatter_tensor": ("output", "input"),
    "scatter": ("tensor", "scatter_list"),
}
MODULE = "torch.distributed.distributed_c10d"
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")
LEAVE_OUT = (
    "build the model as for one process, with groups of one rank, and leave out what "
    "sums over processes: a step computes what one process does on the whole batch, "
    "with the collectives that its plan needs"
)


class Done:
    """The handle of a collective that was started, and is done."""

    def wait(self, *_: Any) -> bool:
        """Returns at once, as `is_completed` says."""
        return True

    is_completed = is_success = wait


class OwnCollectives(TorchFunctionMode):
    """Runs the calls of `torch.distributed` in a forward, or a backward of its own, for
    a group of one rank, and refuses those for other groups."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Replaces collectives; calls all else unchanged."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") != MODULE:
            return func(*args, **kwargs)
        bound = inspect.signature(func).bind(*args, **kwargs).arguments
        name = func.__name__
        counts = inspect.unwrap(func).__globals__["get_world_size"]  # beside it
        ranks = counts(bound.get("group"))
        if name not in WRITES or ranks != 1:
            raise refusal(name, ranks, at_work())
        if (names := WRITES[name]) is not None:
            outs, xs = (_listed(bound[name]) for name in names)
            for out, x in zip(outs, xs, strict=True):
                out.copy_(x.reshape(out.shape))
        return Done() if bound.get("async_op") else None


def collective(target: torch._ops.OpOverload, args: Any, source: str) -> Any:
    """The result of an operator of torch's collectives in a group of one rank. Raises:
    CaptureError for a larger group."""
    name = name_of(target)
    if name == "wait_tensor":
        return args[0]
    groups = [arg for arg in args if isinstance(arg, str)]
    ranks = _ranks(groups[-1]) if groups else None
    if ranks != 1:
        raise refusal(name, ranks, source)
    return args[0]


def name_of(target: torch._ops.OpOverload) -> str:
    """An operator's name, without its namespace."""
    return target._schema.name.rpartition("::")[2]


def is_collective(target: Any) -> bool:
    """Whether an operator communicates."""
    return getattr(target, "namespace", "") in NAMESPACES


def refusal(name: str, ranks: int | None, source: str) -> CaptureError:
    """The error for communication in forward, by `name`, in a group of `ranks`."""
    group = "" if ranks is None else f" in a group of {ranks}"
    return CaptureError(
        f"forward communicates between processes by itself: '{name}'{group}",
        source=source,
        fix=LEAVE_OUT,
    )


def _ranks(group: str) -> int:
    return torch._C._distributed_c10d._resolve_process_group(group).size()


def _listed(x: Tensor | list[Tensor]) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)
