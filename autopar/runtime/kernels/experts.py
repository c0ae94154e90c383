"""Rows times the weights of their experts: those of one expert brought together.

Rows are sorted by expert, and multiplied group by group. Where torch has one kernel for
all groups, the host never learns how long they are, and waits for nothing.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.kernels import linear_weight_grad_, unpermute_rows

ALIGNED = 16  # bytes at whose multiples the grouped kernels want rows to begin
MOST = 1023  # groups that they take


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of one expert after another times its matrix: x [rows, K], weight [E, K, N],
    where the rows of each end [E] -> [rows, N]; zeros in those behind."""
    products = _at_once if _fit(x, weight) else _one_by_one
    return products(x, weight, ends)


def grouped_weight_grad_(grad: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """grad[expert] += dy^T x of its rows: grad [E, N, K], dy [rows, N], x [rows, K]."""
    if len(grad) <= MOST and _fit(dy, x):
        products = F.grouped_mm(dy.mT, x, offs=ends)
        # An expert without rows may get anything: pytorch/pytorch issue 172439.
        empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return grad.add_(products.masked_fill_(empty[:, None, None], 0))
    for one, group in zip(grad, _groups(ends), strict=True):
        if group.start < group.stop:
            linear_weight_grad_(one, dy[group], x[group])
    return grad


def expert_linear(x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
    """Multiplies each row by its expert's matrix: x [rows, K], expert [rows], weight
    [E, K, N] -> [rows, N]; zeros where the expert is not in 0 .. E-1."""
    if x.shape[1] == 1:  # as of biases: nothing is summed, and nothing waited for
        place, inside = _place(expert, len(weight))
        return weight[place, 0].mul_(x).masked_fill_(~inside, 0)
    places, ends = by_expert(expert, len(weight))
    return unpermute_rows(grouped_linear(x[places], weight, ends), places)


def expert_weight_grad_(grad: Tensor, dy: Tensor, x: Tensor, expert: Tensor) -> Tensor:
    """grad[expert] += dy^T x: grad [E, N, K], dy [rows, N], x [rows, K], expert [rows].

    Rows whose expert is not in 0 .. E-1 count for none.
    """
    if x.shape[1] == 1:
        place, inside = _place(expert, len(grad))
        rows = (dy * x.where(inside, 0)).to(grad.dtype)
        grad[..., 0].index_put_((place,), rows, accumulate=True)
        return grad
    places, ends = by_expert(expert, len(grad))
    return grouped_weight_grad_(grad, dy[places], x[places], ends)


@cache
def has_grouped_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies all groups in one kernel there.

    In bfloat16 on GPUs of compute capability 9 and 10, by torch 2.11 to 2.15
    (`_grouped_mm_cuda` in aten's GroupedBlas.cpp). For what else it takes, on the CPU
    too, it waits for the lengths of groups, and multiplies one by one.
    """
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _at_once(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [rows, K] sorted, weight [E, K, N], ends [E] -> [rows, N]."""
    y = F.grouped_mm(x, weight, offs=ends)
    others = torch.arange(len(x), device=x.device) >= ends[-1]  # were not written
    return y.masked_fill_(others[:, None], 0)


def _one_by_one(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same; waits for the device."""
    y = x.new_zeros(len(x), weight.shape[2])
    for group, one in zip(_groups(ends), weight, strict=True):
        if group.start < group.stop:
            torch.mm(x[group], one, out=y[group])
    return y


def _fit(*operands: Tensor) -> bool:
    """Whether these are such as grouped products take."""
    return all(
        has_grouped_products(x.device, x.dtype)
        and x.shape[0] > 0 and (x.ndim == 2 or x.shape[0] <= MOST)
        and all(n * x.element_size() % ALIGNED == 0 for n in x.shape[1:])
        and x.storage_offset() * x.element_size() % ALIGNED == 0
        and (x.is_contiguous() or x.mT.is_contiguous())
        for x in operands
    )  # fmt: skip


def _place(expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """expert [rows] -> (the same, 0 for others than 0 .. E-1; bool [rows, 1], whether
    it is none of these)."""
    inside = (expert >= 0) & (expert < experts)
    return expert.where(inside, 0), inside[:, None]


def by_expert(expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """expert [rows] -> (the rows in the order of their experts, those of none at the
    end, int64 [rows]; where each expert's end, int32 [experts])."""
    inside = expert.where((expert >= 0) & (expert < experts), experts)
    ordered, order = inside.sort(stable=True)
    each = torch.arange(experts, device=expert.device, dtype=ordered.dtype)
    return order, torch.searchsorted(ordered, each, right=True, out_int32=True)


def _groups(ends: Tensor) -> list[slice]:
    """Returns each expert's rows, in their order; waits for the device."""
    places = ends.tolist()
    return [slice(a, b) for a, b in zip([0, *places[:-1]], places, strict=True)]
