"""Functions of torch that are given a model of which a step has a copy: it has nothing
to clip, and weights that nobody trains; or a step's gradients, whose norm is that of
all ranks' parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class Watcher(Protocol):
    """Knows a step's parameters, and refuses calls that would not reach them."""

    def check_originals(self, whose: str, params: list[Tensor], fix: str) -> None: ...

    def check_averaged(self, params: list[Tensor]) -> None: ...

    def norm_of_all(self, grads: list[Tensor]) -> Tensor | None: ...


WATCHING: WeakSet[Any] = WeakSet()


def watch_functions(watcher: Watcher) -> None:
    """Tells a watcher, as long as it lives, of the arguments of these functions."""
    _put_in_place()
    WATCHING.add(watcher)


@cache
def _put_in_place() -> None:
    """Replaces the functions by watched ones, as they have no hooks."""
    of_these = torch.nn.utils.get_total_norm

    @wraps(of_these)
    def of_all(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        grads = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        for watcher in [*WATCHING] if norm_type == 2 else ():
            if (norm := watcher.norm_of_all(grads)) is not None:
                if error_if_nonfinite:
                    of_these([norm], error_if_nonfinite=True)
                return norm
        return of_these(grads, norm_type, error_if_nonfinite, foreach)

    # By the name that users know, and by that under which clip_grad_norm_ calls it.
    torch.nn.utils.get_total_norm = of_all
    setattr(torch.nn.utils.clip_grad, of_these.__name__, of_all)
    for name, fix in (
        ("clip_grad_norm_", "step.clip_grad_norm_(max_norm)"),
        ("clip_grad_value_", "clip_grad_value_(step.parameters(), value)"),
    ):
        watched = _watched(getattr(torch.nn.utils, name), fix)
        setattr(torch.nn.utils, name, watched)
        setattr(torch.nn.utils.clip_grad, name, watched)
    update = AveragedModel.update_parameters

    @wraps(update)
    def checked(self: AveragedModel, model: nn.Module) -> None:
        for watcher in [*WATCHING]:
            watcher.check_averaged([*model.parameters()])
        update(self, model)

    setattr(AveragedModel, update.__name__, checked)


def _watched(clip: Callable[..., Any], fix: str) -> Callable[..., Any]:
    @wraps(clip)
    def checked(
        parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        one = isinstance(parameters, Tensor)
        params = [parameters] if one else [*parameters]
        for watcher in [*WATCHING]:
            watcher.check_originals(f"{clip.__name__} was given", params, fix)
        return clip(params, *args, **kwargs)

    return checked
