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
# What hands all of it on as if it were whole.
TAKES = frozenset(
    {
        *(Tensor.numpy, Tensor.tolist, Tensor.__array__),
        *(torch.histc, Tensor.histc, torch.histogram, Tensor.histogram),
    }
)
# What picks an element out of them, and asks nothing of all.
PICKS = frozenset({Tensor.__getitem__, torch.select, Tensor.select})
# What norms are written with by hand: element by element, of rows, or of several
# gradients that are put together.
STEPS = frozenset(
    {
        *(
            getattr(owner, name)
            for owner in (torch, Tensor)
            for name in (
                *("abs", "pow", "square", "mul", "flatten", "ravel", "reshape"),
                *("clone", "isnan", "isinf", "isfinite", "logical_not"),
                *("sum", "mean", "amax", "amin", "any", "all"),
            )
        ),
        *(torch.cat, torch.stack, torch.concat, torch.hstack),
        *(Tensor.__pow__, Tensor.__mul__, Tensor.__rmul__, Tensor.__invert__),
        *(Tensor.detach, Tensor.float, Tensor.double, Tensor.to, Tensor.view),
        *(Tensor.cpu, Tensor.contiguous, Tensor.view_as, Tensor.reshape_as),
        Tensor.data.__get__,
    }
)


class ShardError(AutoparError):
    """A rank's part is taken for the whole."""


class ShardGradient(Tensor):
    """This rank's part of the gradients, which shares its memory with a plain tensor.

    Everything is computed as with that one, except norms, also those that are written
    by hand, and what else makes one number of all elements, which is refused: the norm
    of a part is not that of the whole, and ranks that clip by norms of their own, or
    skip a step because of a NaN of their own, drift apart. So are histograms, and what
    hands all elements to NumPy or Python.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            refused = func in NORMS or func in TAKES
            result = None if refused else func(*args, **(kwargs or {}))
            is_number = isinstance(result, Tensor) and not result.ndim
            parts = (x.ndim for x in args if isinstance(x, cls))
            if refused or (is_number and func not in PICKS and any(parts)):
                raise ShardError(
                    f"the {func.__name__} of what this rank holds is not that of the "
                    "gradients: other ranks hold other parts of them",
                    fix="clip by step.clip_grad_norm_(max_norm), which returns the "
                    "norm of all gradients, before; it changes nothing with "
                    "float('inf'), and is not finite where a gradient is not. Of each "
                    "parameter's gradient: step.gradient_norms(); of the part: "
                    "p.grad.as_subclass(torch.Tensor)",
                )
            if func in STEPS and isinstance(result, Tensor):
                return result.as_subclass(cls)
            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain tensor is saved."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)
