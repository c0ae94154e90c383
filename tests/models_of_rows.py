"""Models whose data choose rows, in the words of public mixtures of experts and losses:
loops over experts, guards, counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, randomize, token_batch
from torch import Tensor, nn

EXPERTS, CHOSEN = 3, 2


class Experts(nn.Module):
    """add: what experts add to x [rows, 32], given the experts that rows chose, and
    their weights [rows, 2]."""

    def __init__(self, add: Callable[..., Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.SiLU()).append(
                nn.Linear(48, WIDTH)
            )
            for _ in range(EXPERTS)
        )
        self.add, self.name = add, add.__name__

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weight, chosen = self.router(rows).topk(CHOSEN)
        return x + self.add(self, rows, weight.softmax(-1), chosen).view_as(x)


def in_place(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    masks = (chosen[..., None] == torch.arange(EXPERTS)).permute(2, 0, 1)
    for mask, expert in zip(masks, m.experts, strict=True):
        row, place = torch.where(mask)
        y[row] += weight[row, place, None] * expert(x[row])
    return y


def of_tables(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y, share = torch.zeros_like(x), torch.zeros(len(x))
    for e, expert in enumerate(m.experts):
        row, place = (chosen == e).nonzero().T
        turned = torch.argwhere(chosen == e).transpose(0, 1).permute(1, 0).t()
        y.index_add_(0, turned[0], expert(x[turned[-2]]) * weight[row, place, None])
        share.index_fill_(0, row, e)
        share = share.index_fill(0, row, x.mean())
    return y * share[:, None]


def one_hot(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    masks = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for e, expert in enumerate(m.experts):
        place, row = torch.where(masks[e])
        mine = expert(x[None, row].reshape(-1, WIDTH)) * weight[row, place, None]
        y.index_add_(0, row, mine)
    return y


def listed(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    masks = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for e, expert in enumerate(m.experts):
        place, row = torch.where(masks[e])
        if row.shape[0] == 0:
            continue
        rows, places = row.tolist(), place.tolist()
        mine = expert(x[None, rows].reshape(-1, WIDTH)) * weight[rows, places, None]
        y.index_add_(0, row, mine)
    return y


def counted_list(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    rows = torch.where(chosen[:, 0] == 1)[0].tolist()
    return x * sum(rows)


def copies(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    x, flat = x.repeat_interleave(CHOSEN, 0), chosen.flatten()
    y = torch.empty_like(x)
    for e, expert in enumerate(m.experts):
        y[flat == e] = expert(x[flat == e])
    return (y.view(*weight.shape, -1) * weight[..., None]).sum(1)


def of_samples(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    x, y = x.unflatten(0, (4, -1)), torch.zeros_like(x).unflatten(0, (4, -1))
    for e, expert in enumerate(m.experts):
        mask = (chosen == e).any(-1).unflatten(0, (4, -1))
        share = (weight * (chosen == e)).sum(-1).unflatten(0, (4, -1))
        y[mask] += expert(x[mask]) * share[mask][:, None]
    return y


def of_a_view(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """A mask of rows chooses what is computed, as samples and places where it goes."""
    y = torch.zeros_like(x).unflatten(0, (4, -1))
    for e, expert in enumerate(m.experts):
        flat, share = (chosen == e).any(-1), (weight * (chosen == e)).sum(-1)
        mask = flat.unflatten(0, (4, -1))
        y[mask] = expert(x[flat]) * share[flat][:, None] + y[mask]
    return y.flatten(0, 1)


def scattered(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row = (chosen == e).any(-1).nonzero().squeeze(-1)
        share = (weight * (chosen == e)).sum(-1).index_select(0, row)
        mine = expert(x.index_select(0, row)) * share[:, None]
        y = y.scatter_add(0, row[:, None].expand(-1, WIDTH), mine)
    return y


def of_one_mask(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """A mask that is written to is another one."""
    y, mask = torch.zeros_like(x), chosen[:, 0] == 0
    y[mask] += m.experts[0](x[mask])
    mask |= chosen[:, 1] == 1
    y[mask] += m.experts[1](x[mask])
    return y


def several(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Of one row several elements may be chosen."""
    row, place = torch.where(chosen > 0)
    return torch.zeros_like(x).index_add(0, row, x[row] * weight[row, place, None])


def if_any(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (chosen == e).any(-1)
        if mask.any():
            y[mask] += expert(x[mask]) * (weight * (chosen == e)).sum(-1)[mask][:, None]
    return y


def if_not_none(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        if not (mask := chosen == e).any():
            continue
        row = mask.any(-1).nonzero(as_tuple=False).squeeze(-1)
        if row.numel() == 0:
            continue
        place = mask[row].int().argmax(-1, keepdim=True)
        share = weight.index_select(0, row).gather(-1, place)
        y.index_add_(0, row, expert(x.index_select(0, row)) * share)
    return y


def if_counted(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = x
    for e, expert in enumerate(m.experts):
        if (chosen == e).sum() > 0:
            y = y + expert(x) * (weight * (chosen == e)).sum(-1, keepdim=True)
    return y


def if_in(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for number in torch.unique(chosen.flatten()):
        e = int(number.item())
        row, place = torch.where(chosen == e)
        y[row] += m.experts[e](x[row]) * weight[row, place, None]
    return y


def if_in_counts(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    for e, count in enumerate(counts):
        if count == 0:
            continue
        row, place = torch.where(chosen == e)
        y[row] += m.experts[e](x[row]) * weight[row, place, None]
    return y


# Whether there are rows, of a mask and of their places.
WORDS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda mask, rows: mask.any().item(),
    lambda mask, rows: mask.sum().item() > 0,
    lambda mask, rows: int(mask.sum()) > 0,
    lambda mask, rows: not mask.sum().eq(0),
    lambda mask, rows: not ~mask.any(),
    lambda mask, rows: torch.count_nonzero(mask) > 0,
    lambda mask, rows: mask.max(),
    lambda mask, rows: len(rows),
    lambda mask, rows: rows.shape[0] != 0,
    lambda mask, rows: rows.size(0) >= 1,
]


def in_words(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for asks in WORDS:
        mask = (chosen == 1).any(-1)
        rows = torch.argwhere(mask)[:, 0]
        if asks(mask, rows):
            y.index_copy_(0, rows, m.experts[1](x[rows]) + y[rows])
    return y


def of_two(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """One row is not the same as several."""
    x = x.clone()
    mask = chosen[:, 0] == 1
    if len(x[mask]) > 1:
        x[mask] = 2 * x[mask]
    return x


def of_length(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    rows = x[chosen[:, 0] == 1]
    return x + rows.sum(0) / (len(rows) + 1)


def else_nothing(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """So that all parameters have gradients, if they are 0."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = chosen == e
        if mask.any():
            row = mask.any(-1).nonzero().flatten()
            y.index_add_(0, row, expert(x[row]) * weight[mask].view(-1, 1))
        else:
            y[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
    return y


def by_masks(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask, new = (chosen == e).any(-1), torch.zeros_like(x)
        if mask.any():
            new[mask] = expert(x[mask])
            new = y.clone() + new
            y = y.masked_scatter(mask[:, None], new[mask])
    return y


def different(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    return x / len(torch.unique(chosen))


def of_each(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    for number in chosen.unique():
        x = x + number
    return x


def moved(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    chosen += 1
    for number in chosen.unique():
        x = x + (chosen == number).any(-1, keepdim=True) * m.experts[int(number) - 1](x)
    return x


def split(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    return torch.cat([rows for rows in x.repeat(CHOSEN, 1).split(counts)])[: len(x)]


def weighed(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    for e, amount in enumerate(torch.bincount(chosen.flatten(), weight.flatten())):
        x = x + amount * m.experts[e](x)
    return x


def themselves(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    x[mask] += m.experts[0](x[mask])
    return x


def more(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    x[mask] += m.experts[0](x[mask])
    return x + 1e-3


def others(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    x[~mask] += m.experts[0](x[~mask])
    return x


def summed(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return x + x[mask].mean(0)


def guarded(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What is done if there are rows is more than to change these."""

    def add(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        x, mask = x.clone(), chosen[:, 0] == 1
        return change(m, x, mask) if mask.any() else x

    return add


def if_first(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    x, mask = x.clone(), chosen[:, 0] == 1
    return themselves(m, x, mask) if mask[0] else x


def if_positive(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    total = x.sum()
    return x + total if total > 0 else x


def never_chosen(minlength: int) -> Callable[..., Tensor]:
    """The last expert is never chosen, and counts are no longer than asked for."""

    def add(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        chosen = (m.router(x) - 99 * torch.arange(EXPERTS)).topk(CHOSEN).indices
        counts = torch.bincount(chosen.flatten(), minlength=minlength)
        return x + counts.to(x.dtype).mean()

    return add


def if_in_short_counts(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    for e, count in enumerate(torch.bincount(chosen.flatten()).tolist()):
        if count:
            x = x + m.experts[e](x) * (chosen == e).any(-1, keepdim=True)
    return x


class Chosen(nn.Module):
    """Layers of experts, and a loss over chosen tokens."""

    def __init__(
        self, loss: Callable[..., Tensor], *adds: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Experts(add) for add in adds)
        self.loss, self.name = loss, loss.__name__

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.head(x), labels)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale)[x > 0].mean()


def case(loss: Callable[..., Tensor], *adds: Callable[..., Tensor]) -> Case:
    torch.manual_seed(0)
    model = randomize(Chosen(loss, *adds))
    return Case(model, token_batch(4, 8, ignored="none")).double()
