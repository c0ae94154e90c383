"""Functions of TorchScript are captured as the Python that they were made of.

Once it has run a few times, TorchScript derives parts of a function by itself, and runs
these on operands that are detached: a capture would see no derivative. Where there is
no Python, or a name in it means another function by now, a new function of the same
graph is run, plainly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ...errors import CaptureError
from ...replaced import replaced


@contextmanager
def scripts_as_python() -> Iterator[None]:
    """Runs scripted functions as Python while a forward is captured."""
    functions: Any = torch.jit.ScriptFunction
    usual = functions.__call__
    known: dict[int, tuple[Any, Callable[..., Any]]] = {}

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if id(function) not in known:
            known[id(function)] = function, _made_of(function, usual)
        return known[id(function)][1](*args, **kwargs)

    with replaced(functions, "__call__", call):
        yield


def _made_of(function: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes as a scripted one does, and shows its derivative."""
    python = getattr(function, "_torchdynamo_inline", None)
    if python is not None and _graph_now(python) == str(function.inlined_graph):
        return python
    made = torch._C._create_function_from_graph(
        function.name, function.inlined_graph.copy()
    )
    parameters = function.schema.arguments

    def call(*args: Any, **kwargs: Any) -> Any:
        left = parameters[len(args) :]
        named = [kwargs.get(a.name, a.default_value) for a in left]
        with torch.jit.optimized_execution(False):
            return run(made, *args, *named)

    return call


def _graph_now(python: FunctionType) -> str | None:
    """The graph of a function scripted anew, by the present meaning of its names."""
    again = FunctionType(
        python.__code__,
        python.__globals__,
        python.__name__,
        python.__defaults__,
        python.__closure__,
    )
    again.__annotations__ = python.__annotations__
    again.__kwdefaults__ = python.__kwdefaults__
    again.__module__ = python.__module__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return str(torch.jit.script(again).inlined_graph)
        except RuntimeError:  # TorchScript cannot read one of these
            return None


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
