"""Calling a model as its user does: by keyword, for its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from passes.errors import CaptureError


def loss_of(
    model: nn.Module,
    fields: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """The scalar loss of `model(**fields)`, or of `loss_fn(model(**fields), fields)`.

    Fields that only the loss function reads (labels, weights) stay out of the model's
    call. Raises: CaptureError, if no single scalar loss comes out.
    """
    given = dict(fields)
    if loss_fn is None:
        return find_loss(model(**given))
    names = inspect.signature(model.forward).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in names.values()):
        given = {k: v for k, v in given.items() if k in names}
    return find_loss(loss_fn(model(**given), fields))


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
