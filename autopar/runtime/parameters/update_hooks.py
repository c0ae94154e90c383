"""Hooks around `optimizer.step()`, which run once an update."""

from __future__ import annotations

import sys
from typing import Any, Protocol
from weakref import finalize, ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# Of what torch puts around `step`, which calls the hooks.
AROUND: Any = Optimizer.profile_hook_step(lambda: None).__code__


class Watcher(Protocol):
    """Looks at optimizers before and after their updates."""

    def before(self, optimizer: Optimizer) -> None: ...

    def after(self) -> None: ...


def watch_updates(watcher: Watcher) -> None:
    """Calls a watcher around every update of this process, for as long as it lives."""
    here = ref(watcher)

    # What `torch.compile` compiles of an optimizer is its own update.
    @torch.compiler.disable
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (own := here()) is not None and not is_nested(optimizer):
            own.before(optimizer)

    @torch.compiler.disable
    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (own := here()) is not None and not is_nested(optimizer):
            own.after()

    finalize(watcher, register_optimizer_step_pre_hook(before).remove)
    finalize(watcher, register_optimizer_step_post_hook(after).remove)


def is_nested(optimizer: Optimizer) -> bool:
    """Whether the hook that asks is one of an update within another of the same
    optimizer: where `step` calls that of the class it is derived from, torch calls
    hooks around both, if an optimizer of that class was made in this process."""
    frame, updates = sys._getframe(1), 0
    while (before := frame.f_back) is not None:
        frame = before
        own = frame.f_code is AROUND and frame.f_locals.get("self") is optimizer
        updates += own
    return updates > 1
