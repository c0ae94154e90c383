"""Models far bigger than memory: parameters on the meta device, buffers real.

`torch.device("meta")` would put buffers there too, and lose what is in them: a rotary
embedding's frequencies, a mask. These are small, are needed at run time, and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.passes.replaced import replaced


class _BigOnMeta(TorchFunctionMode):
    """Sends big tensors that have no content yet to the meta device.

    Weights start from these functions; buffers come from others, such as `arange`.
    What draws weights there does nothing, and torch takes long to find that out.
    """

    # By name: transformers puts functions of its own in the place of those of nn.init.
    DRAWS = frozenset({"normal_", "uniform_", "kaiming_normal_", "kaiming_uniform_"})
    ELEMENTS = 1 << 16
    # No buffer has as many zeros: these are to become weights.
    LEAST: ClassVar = {
        **dict.fromkeys((torch.empty, torch.rand, torch.randn), ELEMENTS),
        torch.zeros: 1 << 28,
    }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.DRAWS:
            drawn = args[0] if args else kwargs.get("tensor")
            if isinstance(drawn, Tensor) and drawn.is_meta:
                return drawn
        least = self.LEAST.get(func)
        if least is not None and kwargs.get("device") is None:
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.numel() >= least:
                return made
        return func(*args, **kwargs)


@contextmanager
def parameters_on_meta() -> Iterator[Callable[[nn.Module], None]]:
    """Make a model inside, and call the function that this gives on it.

    Big parameters that begin as something else go there when a module gets them, so
    that no two of them are in memory at once.
    """
    register = nn.Module.register_parameter

    def register_on_meta(
        self: nn.Module, name: str, param: nn.Parameter | None
    ) -> None:
        if param is not None and param.numel() >= _BigOnMeta.ELEMENTS:
            param = param if param.is_meta else _to_meta(param)
        register(self, name, param)

    own = replaced(nn.Module, "register_parameter", register_on_meta)
    with own, _BigOnMeta():
        yield _finish


@contextmanager
def on_meta() -> Iterator[None]:
    """Make a model in it without memory for its weights.

    Parameters of 65,536 elements and more are on the meta device, buffers are real, so
    that `autopar.compile` can make or read the weights, each rank its own part of them.
    """
    with _BigOnMeta():
        yield


def _finish(model: nn.Module) -> None:
    """Move the small parameters to meta as well. A tied parameter stays one."""
    tables = [module._parameters for module in model.modules()]
    old = {id(p): p for table in tables for p in table.values() if p is not None}
    new = {key: p if p.is_meta else _to_meta(p) for key, p in old.items()}
    for table in tables:
        for name, p in table.items():
            if p is not None:
                table[name] = new[id(p)]


def _to_meta(p: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    vars(made).update(vars(p))  # marks for optimizers, as `_no_weight_decay`
    return made
