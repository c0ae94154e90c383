"""Functions of TorchScript are captured as the Python that they were made of.

Once it has run a few times, TorchScript derives parts of a function by itself, and runs
these on operands that are detached: a capture would see no derivative.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..capture.user_frames import at_work
from ..errors import CaptureError


@contextmanager
def scripts_as_python() -> Iterator[None]:
    """Around a forward that is captured. Within, a call of a function that was loaded
    from a file, of which there is no Python, raises CaptureError."""
    functions: Any = torch.jit.ScriptFunction
    usual = functions.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        python = getattr(function, "_torchdynamo_inline", None)
        if python is None:
            raise CaptureError(
                f"forward calls '{function.name}', a function of TorchScript whose "
                "derivative is not seen in a capture",
                source=at_work(),
                fix="call the Python function that it was made of",
            )
        return python(*args, **kwargs)

    functions.__call__ = call
    try:
        yield
    finally:
        functions.__call__ = usual


def refuse_scripted(model: nn.Module) -> None:
    """Raises CaptureError for a module that TorchScript has made its own."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"the module '{name}' is of TorchScript, whose derivative is not seen "
                "in a capture",
                fix="give it as it is before torch.jit.script or torch.jit.trace; a "
                "torch.jit.ScriptModule as an nn.Module, without script_method",
            )
