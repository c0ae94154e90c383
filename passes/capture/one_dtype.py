"""Functions that want operands of one dtype, under autocast."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ops.op import OPS


def wants_one_dtype(function: str) -> bool:
    """Whether a function of torch, by its name, wants operands of one dtype."""
    op = OPS.get(f"aten.{function.removesuffix('_')}")
    return op is not None and (op.autocast == "equal" or op.name == "aten.complex")


class OneDtype(TorchFunctionMode):
    """Gives the functions that want one the widest dtype of their operands, where they
    would raise: autocast does so for few, on CUDA for more than on the CPU. What is
    written into keeps its dtype, and the rest gets that."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not wants_one_dtype(name):
            return func(*args, **kwargs)
        operands = (*args, *kwargs.values())
        reals = [x for x in operands if isinstance(x, Tensor) and x.is_floating_point()]
        first = reals[:1] if name.endswith("_") else reals
        dtype = max((x.dtype for x in first), key=lambda d: d.itemsize, default=None)

        others = [x for x in reals if x.dtype is not dtype]

        def cast(x: Any) -> Any:
            return x.to(dtype) if any(x is other for other in others) else x

        return func(*map(cast, args), **{k: cast(x) for k, x in kwargs.items()})
