"""Gradients of shards, which look like gradients until somebody takes their norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.passes.errors import AutoparError

NORMS = frozenset(
    {
        torch.norm,
        torch.linalg.norm,
        torch.linalg.vector_norm,
        torch.linalg.matrix_norm,
        Tensor.norm,
        torch._foreach_norm,
        torch.dot,
        Tensor.dot,
    }
)
# What norms are written with by hand: of all elements, unless a dim is given.
SUMS = frozenset(
    {
        *(torch.sum, torch.mean, torch.max, torch.amax),
        *(Tensor.sum, Tensor.mean, Tensor.max, Tensor.amax),
    }
)
# What comes before it there, element by element.
STEPS = frozenset(
    {
        *(torch.abs, torch.pow, torch.square, torch.mul, torch.flatten),
        *(Tensor.abs, Tensor.pow, Tensor.square, Tensor.mul, Tensor.flatten),
        *(Tensor.__pow__, Tensor.__mul__, Tensor.__rmul__, Tensor.detach),
        *(Tensor.float, Tensor.double, Tensor.to, Tensor.view, Tensor.reshape),
        Tensor.data.__get__,
    }
)


class ShardError(AutoparError):
    """A rank's part is taken for the whole."""


class ShardGradient(Tensor):
    """This rank's part of the gradients, which shares its memory with a plain tensor.

    Everything is computed as with that one, except norms, also those that are written
    by hand, which are refused: the norm of a part is not that of the whole, and ranks
    that clip by norms of their own drift apart.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        of_all = func in SUMS and len(args) == 1 and "dim" not in keywords
        if of_all or func in NORMS:
            raise ShardError(
                "the norm (or sum) of what this rank holds is not that of the "
                "gradients: other ranks hold other parts of them",
                fix="clip by step.clip_grad_norm_(max_norm), which returns the norm of "
                "all gradients, before; it changes nothing with float('inf'). For a "
                "norm of the part: p.grad.as_subclass(torch.Tensor).norm()",
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **keywords)
            return result.as_subclass(cls) if func in STEPS else result
