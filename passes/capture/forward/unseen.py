"""Refuses what changes gradients unseen by a capture: hooks, and derivatives taken in
forward. `.data` is read as what it means, a detached tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import CaptureError
from ..forward.equal_sizes import call
from ..forward.guards import Guards
from ..forward.known_values import KnownValues
from ..forward.listed_rows import with_rows
from ..forward.outside import note_outside
from ..forward.user_frames import at_work
from ..forward.values_read import Read, read_by, tried_by

AFTER_STEP = (
    "remove it before compile (handle.remove()); what it does to gradients can be done "
    "after step(...), which leaves them in p.grad of step.parameters()"
)
ON_TENSORS = {
    Tensor.register_hook: "register_hook",
    Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
}
DERIVATIVES = {
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
    Tensor.backward: "Tensor.backward",
}
ALLOWED = ContextVar("derivatives_allowed", default=False)
DATA = Tensor.data.__get__  # type of a getset descriptor's method


def refuse_hooks(model: nn.Module) -> None:
    """Raises CaptureError that names the first parameter or module with a hook on its
    gradients. Hooks on forwards are part of what is captured."""
    for name, p in model.named_parameters():
        hooks = p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
        if hooks:
            raise CaptureError(
                f"the parameter '{name}' has a hook on its gradient "
                f"({_names(hooks)}), which programs do not call",
                fix=AFTER_STEP,
            )
    for name, module in model.named_modules():
        hooks = {**module._backward_hooks, **module._backward_pre_hooks}
        if hooks:
            raise CaptureError(
                f"the module '{name}' ({type(module).__name__}) has a hook on its "
                f"backward ({_names(hooks)}), which programs do not call",
                fix=AFTER_STEP,
            )
    for kind in ("_global_backward_hooks", "_global_backward_pre_hooks"):
        hooks = getattr(torch.nn.modules.module, kind, None)
        if hooks:
            raise CaptureError(
                f"all modules have a hook on their backward ({_names(hooks)}), which "
                "programs do not call",
                fix=AFTER_STEP,
            )


def _names(hooks: Any) -> str:
    names = (getattr(h, "__qualname__", type(h).__name__) for h in hooks.values())
    return ", ".join(names)


@contextmanager
def derivatives_allowed() -> Iterator[None]:
    """Lets forward take derivatives within: they become part of what it computes."""
    token = ALLOWED.set(True)
    try:
        yield
    finally:
        ALLOWED.reset(token)


class Unseen(TorchFunctionMode):
    """Watches a captured forward. names: of the model's own parameters, by their ids.
    read: the last call whose result depends on the values of tensors."""

    def __init__(self, known: KnownValues, names: dict[int, str]) -> None:
        super().__init__()
        self.known, self.names = known, names
        self.read: Read | None = None
        self.guards = Guards()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == DATA:
            return args[0].detach()
        if func is Tensor.__deepcopy__ and not args[0].requires_grad:
            func, args = Tensor.clone, args[:1]  # its own looks at a storage
        if func in ON_TENSORS:
            raise CaptureError(
                f"forward puts a hook on a gradient ({ON_TENSORS[func]}), which "
                "programs do not call",
                source=at_work(),
                fix="let forward say what it does: s * x + ((1 - s) * x).detach() is "
                "x with s times its gradient",
            )
        if func in DERIVATIVES and not ALLOWED.get():
            raise CaptureError(
                f"forward takes a derivative ({DERIVATIVES[func]}), which a graph of "
                "its operations does not have",
                source=at_work(),
                fix="write the derivative out by tensor operations, or leave what "
                "needs it out of the loss",
            )
        args = with_rows(func, args)
        answer = self.known.read(func, args[0] if args else None)
        if answer is None:
            answer = self.guards.instead(func, args, kwargs or {})
        if answer is not None:
            return answer
        try:
            result = call(func, args, kwargs or {})
        except Exception as error:
            self.read = tried_by(func, args, error) or self.read
            raise
        with torch._C.DisableTorchFunction():  # what looks at a call is no call
            if not torch.compiler.is_dynamo_compiling():  # a part, as of torch.cond
                note_outside(self.names, func, (args, kwargs), result)
                self.known.note(func, args, kwargs or {}, result)
            self.read = read_by(func, args, result) or self.read
        return self.guards.note(func, args, kwargs or {}, result)
