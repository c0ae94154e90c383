"""Gradients of shards, which look like gradients until somebody takes their norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from passes.errors import AutoparError

NORMS = frozenset(
    {
        torch.norm,
        torch.linalg.norm,
        torch.linalg.vector_norm,
        torch.linalg.matrix_norm,
        Tensor.norm,
        torch._foreach_norm,
    }
)


class ShardError(AutoparError):
    """A rank's part is taken for the whole."""


class ShardGradient(Tensor):
    """This rank's part of the gradients, which shares its memory with a plain tensor.

    Everything is computed as with that one, except norms, which are refused: the norm
    of a part is not that of the whole, and ranks that clip by norms of their own drift
    apart.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in NORMS:
            raise ShardError(
                "the norm of what this rank holds is not the norm of the gradients: "
                "other ranks hold other parts of them",
                fix="clip by step.clip_grad_norm_(max_norm), which returns the norm of "
                "all gradients, before; it changes nothing with float('inf'). For a "
                "norm of the part: p.grad.as_subclass(torch.Tensor).norm()",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
