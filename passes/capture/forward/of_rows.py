"""Functions of torch that ask whether there are any rows, or one: what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """Computes torch's logsumexp."""
    largest = x.detach().amax(dim, True)
    total = (x - largest).exp().sum(dim, True).log() + largest
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return total if keepdim else total.squeeze(dims)


def norm(
    x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Tensor | None:
    """Computes torch's norm over all dims; None of one along some."""
    order = options.pop("ord", p)
    if dim is not None or order == "nuc":
        return None
    order = 2 if order in ("fro", None) else order
    dims = tuple(range(x.ndim))
    return torch.linalg.vector_norm(x, order, dims, keepdim, **options)


OF_ROWS: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp), logsumexp),
    torch.special.logsumexp: logsumexp,
    **dict.fromkeys((torch.norm, Tensor.norm, torch.linalg.vector_norm), norm),
}
