"""Gradients of shards, which look like gradients until somebody takes their norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
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
        # Of rows, by which they divide.
        torch.nn.functional.normalize,
        torch.cosine_similarity,
        *(torch.renorm, Tensor.renorm, Tensor.renorm_),
        # Of all directions together.
        *(torch.svd, Tensor.svd, torch.qr, Tensor.qr),
        *(torch.linalg.svd, torch.linalg.svdvals, torch.linalg.qr),
    }
)
# What hands all of it on as if it were whole.
TAKES = frozenset(
    {
        *(Tensor.numpy, Tensor.tolist, Tensor.__array__),
        *(torch.histc, Tensor.histc, torch.histogram, Tensor.histogram),
    }
)
# What gives a number that is not made of all elements: it picks one of them, makes a
# new tensor, or leaves this class on purpose.
PICKS = frozenset(
    {
        *(Tensor.__getitem__, torch.select, Tensor.select, Tensor.as_subclass),
        *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full),
        *(Tensor.new_empty, Tensor.new_tensor),
    }
)


class ShardError(AutoparError):
    """A rank's part is taken for the whole."""


class ShardGradient(Tensor):
    """This rank's part of a gradient, which shares memory with a plain tensor.

    It computes as a plain tensor does, but refuses norms, also those written by hand,
    and all else that reduces its elements to one number: the norm of a part is not that
    of the whole, and ranks that clip by norms of their own, or skip a step because of a
    NaN of their own, drift apart. It also refuses histograms, and handing all elements
    to NumPy or Python.

    What is computed of it is of this class too, and so is a tensor that it is written
    into, as a buffer of a loop's own that adds up gradients. A parameter stays one.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.detach_ and not args[0].requires_grad:
            own: Tensor = args[0]  # nothing to do, but torch refuses it of a view
            return own
        with torch._C.DisableTorchFunctionSubclass():
            refused = func in NORMS or func in TAKES
            result = None if refused else func(*args, **kwargs)
            is_number = isinstance(result, Tensor) and not result.ndim
            parts = (x.ndim for x in _tensors((args, *kwargs.values()), cls))
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
            if func is not Tensor.as_subclass:
                written = args[:1] if func is Tensor.__setitem__ else ()
                for x in _tensors((result, written), Tensor):
                    if type(x) is Tensor and x.ndim:
                        x.__class__ = cls
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGradient:
        return deepcopy(self.as_subclass(Tensor), memo).as_subclass(ShardGradient)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain tensor is saved."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def as_part(x: Tensor) -> Tensor:
    """The same memory as a `ShardGradient`."""
    return x.as_subclass(ShardGradient)


def no_view(x: Tensor) -> Tensor:
    """The same memory in a tensor that is no view: what loops do to gradients that
    autograd made, as `p.grad.detach_()`, torch refuses of views."""
    return x.new_empty(0).set_(x)


def _tensors(x: object, of: type[Tensor]) -> Iterator[Tensor]:
    """Yields those of a class, also from within lists and tuples."""
    if isinstance(x, of):
        yield x
    elif isinstance(x, list | tuple):
        for item in x:
            yield from _tensors(item, of)
