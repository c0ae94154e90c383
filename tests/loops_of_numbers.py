"""Loops over the numbers of experts that were chosen at all, as people write them: of a
layer m, its tokens x [rows, width], and for each the numbers of some experts and their
weights [rows, chosen]."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _add(m: Any, x: Tensor, weight: Tensor, chosen: Tensor, e: int, y: Tensor) -> None:
    row, place = torch.where(chosen == e)
    y[row] += m.experts[e](x[row]) * weight[row, place, None]


def hit(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """As in Hugging Face's library of 2025."""
    y = torch.zeros_like(x)
    mask = F.one_hot(chosen, num_classes=len(m.experts)).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        place, row = torch.where(mask[e].squeeze(0))
        rows = x[None, row].reshape(-1, x.shape[-1])
        mine = m.experts[e](rows) * weight[row, place, None]
        y.index_add_(0, row, mine.to(x.dtype))
    return y


def hit_or_none(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """With a number for no expert, as in that of 2026."""
    y, count = torch.zeros_like(x), len(m.experts)
    with torch.no_grad():
        mask = F.one_hot(chosen, num_classes=count + 1).permute(2, 1, 0)
        present = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for e in present:
        e = e[0]
        if e == count:
            continue
        place, row = torch.where(mask[e])
        y.index_add_(0, row, m.experts[e](x[row]) * weight[row, place, None])
    return y


def unique(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in chosen.unique():
        row, place = torch.where(chosen == e)
        y[row] += m.experts[int(e)](x[row]) * weight[row, place, None]
    return y


def unique_listed(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in torch.unique(chosen).tolist():
        _add(m, x, weight, chosen, e, y)
    return y


def counted(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    counts = torch.bincount(chosen.flatten(), minlength=len(m.experts))
    for e in torch.where(counts > 0)[0].tolist():
        _add(m, x, weight, chosen, e, y)
    return y


def counted_pairs(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    counts = F.one_hot(chosen, len(m.experts)).sum((0, 1))
    for (e,) in counts.nonzero().tolist():
        _add(m, x, weight, chosen, e, y)
    return y


def flat(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    masks = chosen[..., None] == torch.arange(len(m.experts))
    for e in masks.flatten(0, 1).any(0).nonzero().squeeze(-1).cpu():
        row, place = torch.where(masks[..., e])
        y[row] += m.experts[e.item()](x[row]) * weight[row, place, None]
    return y


PRESENT = (
    hit, hit_or_none, unique, unique_listed, counted, counted_pairs, flat,
)  # fmt: skip


# --- which of them there are counts -------------------------------------------------


def in_turn(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """A turn's place among those that there are is not its number."""
    y = torch.zeros_like(x)
    for place, e in enumerate(chosen.unique().tolist()):
        row, k = torch.where(chosen == e)
        y[row] += m.experts[e](x[row]) * weight[row, k, None] * (place + 1)
    return y


def fading(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """What was added is made less by each turn that there is."""
    y = torch.zeros_like(x)
    counts = F.one_hot(chosen, len(m.experts)).sum((0, 1))
    for e in counts.nonzero().flatten():
        row, k = torch.where(chosen == e)
        y = y * 0.5
        y[row] += m.experts[e](x[row]) * weight[row, k, None]
    return y


def as_many(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    numbers = chosen.unique().tolist()
    return x / max(len(numbers), 1)


def the_first(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in list(chosen.unique())[:1]:
        _add(m, x, weight, chosen, int(e), y)
    return y


def all_experts(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Each turn adds to all rows."""
    for e in chosen.unique():
        x = x + m.experts[e](x)
    return x


def of_others(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Those that were chosen first tell which there are of all choices."""
    y = torch.zeros_like(x)
    for e in F.one_hot(chosen[:, 0], len(m.experts)).sum(0).nonzero().flatten():
        _add(m, x, weight, chosen, int(e), y)
    return y


def the_last(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in list(chosen.unique())[-1:]:
        _add(m, x, weight, chosen, int(e), y)
    return y


def chosen_once(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """An expert that several tokens chose has no turn."""
    y = torch.zeros_like(x)
    counts = F.one_hot(chosen, len(m.experts)).sum((0, 1))
    for e in (counts == 1).nonzero().flatten():
        _add(m, x, weight, chosen, int(e), y)
    return y


COUNTING = (
    in_turn, fading, as_many, the_first, the_last, all_experts, of_others, chosen_once,
)  # fmt: skip
