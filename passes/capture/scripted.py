"""Functions of TorchScript are captured as the Python that they were made of.

Once it has run a few times, TorchScript derives parts of a function by itself, and runs
these on operands that are detached: a capture would see no derivative.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
