"""Calls of a torch.autograd.Function, in whose place something else is called; and of
checkpoints, in whose place what they run is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction

from ...replaced import replaced

Apply = type[torch.autograd.Function]

CHECKPOINT = ("torch.utils.checkpoint", "CheckpointFunction")
# What goes on around a function that a checkpoint of the other kind runs: from torch
# 2.14 on the second of them.
AROUND = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
)

Users = Callable[[Apply, tuple[Any, ...], Mapping[str, Any]], Any]

# Of the outermost checkpoint that is running: each has another one.
checkpoint_number: ContextVar[int | None] = ContextVar("checkpoint", default=None)
_numbers = count()


@contextmanager
def through_checkpoints(users: Users | None = None) -> Iterator[None]:
    """Runs the function of each activation checkpoint itself, which has a number then.

    What is recomputed is decided elsewhere, and a derivative within forward would run
    parts of a checkpoint among the rest. users: what to call instead of a user's
    Function, with its class, arguments and keywords.
    """
    function: Any = torch.autograd.Function
    beneath: Any = function.__mro__[1]
    own = vars(function)["apply"]

    def apply(cls: Apply, *args: Any, **kwargs: Any) -> Any:
        if (cls.__module__, cls.__name__) == CHECKPOINT:
            run, _, *operands = args
            with _numbered():
                return run(*operands)
        if users is None or _is_torchs(cls):
            return super(beneath, cls).apply(*args, **kwargs)
        if not isinstance(own, classmethod) and has_setup(cls):
            bound = inspect.signature(cls.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        return users(cls, args, kwargs)

    instead: list[tuple[Any, str, Any]] = [
        (torch.utils.checkpoint, name, _around)
        for name in AROUND
        if hasattr(torch.utils.checkpoint, name)
    ]
    if isinstance(own, classmethod):
        # Up to torch 2.14 it is Python's, and calls the one beneath, which is replaced:
        # `square = Square.apply` at the top of a file has Function's own.
        assert "apply" not in vars(beneath), "torch's Function is built otherwise"
        instead.append((beneath, "apply", classmethod(apply)))
    else:
        instead.append((function, "apply", classmethod(apply)))
        instead.append((BackwardCFunction, "__init__", _called_by_name(users)))
    with ExitStack() as stack:
        for owner, name, value in instead:
            stack.enter_context(replaced(owner, name, value))
        yield


@contextmanager
def _numbered() -> Iterator[None]:
    """Numbers what runs within, unless it is part of another checkpoint."""
    if checkpoint_number.get() is not None:
        yield
        return
    outside = checkpoint_number.set(next(_numbers))
    try:
        yield
    finally:
        checkpoint_number.reset(outside)


def _around(*_: Any, **__: Any) -> Iterator[None]:
    with _numbered():
        yield


def _called_by_name(users: Users | None) -> Callable[[Any], None]:
    """Returns what is done where a Function's context is made: its forward, which is
    called next, is `users` this once.

    From torch 2.15 on `square = Square.apply` at the top of a file is in C, and nothing
    else of it can be replaced.
    """

    def begin(backward: Any) -> None:
        cls, grad = backward._forward_cls, torch.is_grad_enabled()
        if users is None or _is_torchs(cls):
            return
        previous = vars(cls).get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            if previous is None:
                del cls.forward
            else:
                cls.forward = previous
            before = torch.is_grad_enabled()
            _set_grad(grad)
            try:
                return users(cls, args if has_setup(cls) else args[1:], kwargs)
            finally:
                _set_grad(before)

        forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
        cls.forward = staticmethod(forward)

    return begin


def _set_grad(enabled: bool) -> None:
    """Switches gradients on or off, unseen by a capture: C notes nothing."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)


def _is_torchs(cls: Apply) -> bool:
    """Whether it is of a custom operator, which stays as it is."""
    return cls.__module__.partition(".")[0] == "torch"


def has_setup(cls: Apply) -> bool:
    """Whether a custom Function has its own `setup_context`."""
    return cls.setup_context is not torch.autograd.Function.setup_context
