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
# What norms are written with by hand, and what asks for numbers that are none: of all
# elements, unless a dim is given.
SUMS = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        *("sum", "mean", "max", "amax", "min", "amin", "std", "var", "median"),
        *("any", "all", "count_nonzero", "quantile", "prod"),
    )
)
# What comes before it there, element by element, or puts several gradients together.
STEPS = frozenset(
    {
        *(
            getattr(owner, name)
            for owner in (torch, Tensor)
            for name in (
                *("abs", "pow", "square", "mul", "flatten", "ravel", "reshape"),
                *("clone", "isnan", "isinf", "isfinite", "logical_not"),
            )
        ),
        *(torch.cat, torch.stack, torch.concat, torch.hstack),
        *(Tensor.__pow__, Tensor.__mul__, Tensor.__rmul__, Tensor.__invert__),
        *(Tensor.detach, Tensor.float, Tensor.double, Tensor.to, Tensor.view),
        Tensor.data.__get__,
    }
)


class ShardError(AutoparError):
    """A rank's part is taken for the whole."""


class ShardGradient(Tensor):
    """This rank's part of the gradients, which shares its memory with a plain tensor.

    Everything is computed as with that one, except norms, also those that are written
    by hand, and questions of all elements, which are refused: the norm of a part is not
    that of the whole, and ranks that clip by norms of their own, or skip a step because
    of a NaN of their own, drift apart.
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
        few = 2 if func in (torch.quantile, Tensor.quantile) else 1
        of_all = func in SUMS and len(args) <= few and "dim" not in keywords
        if of_all or func in NORMS:
            raise ShardError(
                f"the {func.__name__} of what this rank holds is not that of the "
                "gradients: other ranks hold other parts of them",
                fix="clip by step.clip_grad_norm_(max_norm), which returns the norm of "
                "all gradients, before; it changes nothing with float('inf'), and is "
                "not finite where a gradient is not. Of each parameter's gradient: "
                "step.gradient_norms(); of the part: "
                "p.grad.as_subclass(torch.Tensor).norm()",
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **keywords)
            return result.as_subclass(cls) if func in STEPS else result
