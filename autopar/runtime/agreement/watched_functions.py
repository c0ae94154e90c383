"""Functions of torch that are given a model of which a step has a copy: it has nothing
to clip, and weights that nobody trains; or a step's parameters, whose gradients are
clipped by the norm of all ranks' parts."""

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

    def clip_all(self, params: list[Tensor], max_norm: float) -> Tensor | None: ...


WATCHING: WeakSet[Any] = WeakSet()


def watch_functions(watcher: Watcher) -> None:
    """Tells a watcher, as long as it lives, of the arguments of these functions."""
    _put_in_place()
    WATCHING.add(watcher)


@cache
def _put_in_place() -> None:
    """Replaces the functions by watched ones, as they have no hooks."""
    of_all = torch.nn.utils.clip_grad_norm_

    def by_norm(
        parameters: list[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        for watcher in [*WATCHING] if norm_type == 2 and not error_if_nonfinite else ():
            if (norm := watcher.clip_all(parameters, max_norm)) is not None:
                return norm
        options = norm_type, error_if_nonfinite, foreach
        return of_all(parameters, max_norm, *options)

    for name, clip, fix in (
        ("clip_grad_norm_", by_norm, "step.clip_grad_norm_(max_norm)"),
        (
            "clip_grad_value_",
            torch.nn.utils.clip_grad_value_,
            "clip_grad_value_(step.parameters(), value)",
        ),
    ):
        watched = _watched(getattr(torch.nn.utils, name), clip, fix)
        setattr(torch.nn.utils, name, watched)
        setattr(torch.nn.utils.clip_grad, name, watched)
    update = AveragedModel.update_parameters

    @wraps(update)
    def checked(self: AveragedModel, model: nn.Module) -> None:
        for watcher in [*WATCHING]:
            watcher.check_averaged([*model.parameters()])
        update(self, model)

    setattr(AveragedModel, update.__name__, checked)


def _watched(
    plain: Callable[..., Any], clip: Callable[..., Any], fix: str
) -> Callable[..., Any]:
    @wraps(plain)
    def checked(
        parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        one = isinstance(parameters, Tensor)
        params = [parameters] if one else [*parameters]
        for watcher in [*WATCHING]:
            watcher.check_originals(f"{plain.__name__} was given", params, fix)
        return clip(params, *args, **kwargs)

    return checked
