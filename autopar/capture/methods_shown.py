"""Attributes of parameters that have the name of a method of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def methods_shown(model: nn.Module) -> Iterator[None]:
    """Hides attributes of parameters and buffers that hide methods of tensors.

    Megatron's layers note how a bias is split by `bias.stride = 1`; torch asks each
    tensor that it traces for its `stride()`.
    """
    tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
    hidden = [
        (vars(x), name, vars(x).pop(name))
        for x in tensors.values()
        for name in [*vars(x)]
        if callable(getattr(torch.Tensor, name, None))
    ]
    try:
        yield
    finally:
        for attributes, name, value in hidden:
            attributes[name] = value
