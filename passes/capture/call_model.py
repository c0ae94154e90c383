"""Calling a model as its user does: by keyword, for its loss."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError


def loss_of(
    model: nn.Module,
    fields: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """The scalar loss of `model(**fields)`, or of `loss_fn(model(**fields), fields)`.

    Fields that only the loss function reads (labels, weights) stay out of the model's
    call, also where it takes any keyword but cannot do with them. Raises: CaptureError,
    if no single scalar loss comes out.
    """
    try:
        return call_for_loss(model, fields, loss_fn)
    except TypeError:
        if only_by_any_keyword(model, fields, loss_fn):
            with contextlib.suppress(TypeError):
                return call_for_loss(model, fields, loss_fn, by_name=True)
        raise


def call_for_loss(
    model: nn.Module,
    fields: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    by_name: bool = False,
) -> torch.Tensor:
    """One call of `loss_of`.

    by_name: leave out what the model takes only because it takes any keyword. Raises:
    TypeError then, if the loss function does not read it either.
    """
    if loss_fn is None:
        return find_loss(model(**fields))
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if takes_any and not by_name:
        return find_loss(loss_fn(model(**fields), fields))
    seen = _Seen(fields)
    named = {k: v for k, v in fields.items() if k in parameters}
    loss = find_loss(loss_fn(model(**named), seen))
    unread = fields.keys() - named.keys() - seen.names
    if takes_any and unread:
        raise TypeError(f"nobody reads {', '.join(sorted(unread))}")
    return loss


def only_by_any_keyword(
    model: nn.Module, fields: Mapping[str, Any], loss_fn: Callable[..., Any] | None
) -> bool:
    """Whether there are fields for the loss function that the model takes only because
    it takes any keyword."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return loss_fn is not None and takes_any and not fields.keys() <= parameters.keys()


class _Seen(dict[str, Any]):
    """The fields of a batch, and the names of those that somebody looked at."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def find_loss(result: Any) -> torch.Tensor:
    """The scalar loss that a model returned: itself, `.loss`, or a tuple's scalar."""
    if isinstance(result, torch.Tensor):
        candidates = [result]
    elif getattr(result, "loss", None) is not None:
        candidates = [result.loss]
    elif isinstance(result, Mapping):
        candidates = [result["loss"]] if result.get("loss") is not None else []
    elif isinstance(result, tuple | list):
        candidates = [x for x in result if isinstance(x, torch.Tensor) and x.ndim == 0]
    else:
        candidates = []
    scalars = [x for x in candidates if x.numel() == 1 and x.is_floating_point()]
    if len(scalars) == 1:
        return scalars[0].reshape(())
    raise CaptureError(
        f"the model returned {describe(result)}, in which there is "
        + ("more than one scalar loss" if scalars else "no scalar loss"),
        fix="pass the labels in the batch if the model computes its own loss, or "
        "give compile a loss_fn(output, batch) that returns a scalar",
    )


def describe(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, Mapping):
        return f"{type(result).__name__} with fields {', '.join(result)}"
    if isinstance(result, tuple | list):
        return f"a {type(result).__name__} of ({', '.join(map(describe, result))})"
    return f"a {type(result).__name__}"
