"""The kernels as Inductor takes them: what it fuses by itself is not done in blocks.

A block of rows at a time saves memory where each op writes its result out. Fused, the
formula alone reads its operands once and keeps nothing in between.
"""

from typing import Any

import torch
from torch import Tensor

from autopar.runtime import kernels


def __getattr__(name: str) -> Any:
    """The others are plain enough."""
    return getattr(kernels, name)


def kept(rows: Tensor | None, cols: Tensor | None, p: float) -> Tensor | None:
    """Computes `autopar.runtime.kernels.kept`: int64 [..., 1], [n] -> bool [..., n]."""
    if rows is None or cols is None:
        return None
    return kernels.mixed(rows + cols) <= kernels.most(p)


def sum_exp(x: Tensor, m: Tensor) -> Tensor:
    """Computes `autopar.runtime.kernels.sum_exp`: x [..., V], m [...] -> [...]."""
    return (x - kernels.finite_or_zero(m)[..., None]).exp().sum(-1)


def sum_exp_backward(x: Tensor, dy: Tensor, m: Tensor) -> Tensor:
    """Computes `autopar.runtime.kernels.sum_exp_backward`: dx, in the dtype of x."""
    shifted = (x - kernels.finite_or_zero(m)[..., None]).exp()
    dy = dy.masked_fill(m == -torch.inf, 0)
    return torch.mul(shifted, dy[..., None]).to(x.dtype)


def sum_exp_backward_(x: Tensor, dy: Tensor, m: Tensor) -> Tensor:
    """The same, written over x."""
    return x.copy_(sum_exp_backward(x, dy, m))


def bias_grad_(grad: Tensor, dy: Tensor) -> Tensor:
    """Computes `autopar.runtime.kernels.bias_grad_`: grad [N] += dy [..., N] summed."""
    return grad.add_(dy.flatten(0, -2).sum(0, dtype=grad.dtype))
