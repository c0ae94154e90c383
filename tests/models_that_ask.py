"""Losses that ask about values, in the words of public training scripts. Each has
logits [b, s, v], labels [b, s], of which -100 count for nothing, and a mask of the
others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor, Tensor], Any]
VOCAB, WIDTH = 16, 12


class Asks(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return self.loss(self.head(self.embed(ids).tanh()), labels, labels != -100)


def batches() -> list[dict[str, Tensor]]:
    """Labels of some tokens, of all, of none; of the first or last samples alone, so
    that one of two ranks, or microbatches, has none; and of one token."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(VOCAB, (2, 4, 6), generator=generator)
    none = torch.full_like(labels, -100)
    first, last, one = none.clone(), none.clone(), none.clone()
    first[:2], last[2:], one[1, 2] = labels[:2], labels[2:], 3
    some = torch.where(labels % 3 > 0, labels, none)
    made = some, labels, none, first, last, one
    return [{"ids": ids, "labels": labels} for labels in made]


def case_of(loss: Loss) -> Case:
    torch.manual_seed(0)
    return Case(Asks(loss), batches()[0]).double()


def each(x: Tensor, y: Tensor) -> Tensor:
    rows = F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none")
    return rows.view_as(y)


def total(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return (each(x, y) * mask).sum()


def cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), y.flatten())


def smooth(x: Tensor) -> Tensor:
    return x.square().mean()


# --- a quotient, if there is anything to divide by --------------------------------


def else_total(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    n, loss = mask.sum(), total(x, y, mask)
    return loss / n if n > 0 else loss


def else_zero(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    n, loss = mask.sum().item(), total(x, y, mask)
    return smooth(x) + (loss / n if n > 0 else loss * 0)


def else_number(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    n, loss = mask.sum(), total(x, y, mask)
    return smooth(x) + (loss / n if n > 0 else 0.0)


def no_less_than_one(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return total(x, y, mask) / max(mask.sum().item(), 1)


def no_more_than_five(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    n = mask.sum().item()
    return total(x, y, mask) / (min(5, n) + 1) + smooth(x) * (3 * n)


def of_rows(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return x[mask].sum() / max(x[mask].shape[0], 1) + smooth(x)


def shared_quotient(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    share, loss = 1 / mask.sum(), total(x, y, mask)
    return loss * share if mask.any() else loss


# --- rows, if there are any -------------------------------------------------------


def each_row(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    loss = smooth(x)
    if mask.any():
        loss = loss + F.cross_entropy(x[mask], y[mask], reduction="none").mean()
    return loss


def beside_rows(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    loss = smooth(x[y != 3])
    if mask.any():
        loss = loss + F.cross_entropy(x[mask], y[mask])
    return loss


def counted_rows(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    rows = x[mask]
    if len(rows) == 0:
        return x.sum() * 0
    return F.cross_entropy(rows, y[mask])


def two_masks(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    loss, large = smooth(x), mask & (y > 8)
    if mask.any():
        loss = loss + F.cross_entropy(x[mask], y[mask])
        loss = loss + x[large].mean() if large.any() else loss * 2
    return loss


def of_classes(x: Tensor, y: Tensor, classes: int) -> Tensor:
    """A mean over the classes that there are."""
    loss, there = smooth(x), 0
    parts = torch.zeros((), dtype=x.dtype)
    for number in range(classes):
        rows = x[y == number]
        if rows.shape[0] > 0:
            parts = parts + rows.square().mean()
            there += 1
    return loss + parts / max(there, 1)


def two_classes(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return of_classes(x, y, 2)


def many_classes(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return of_classes(x, y, 5)


def times_none(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """0 times a mean of rows, of which there may be one or none."""
    loss = smooth(x)
    if (y == 3).sum() > 1:
        loss = loss + 0 * x[y == 3].mean()
    return loss


def several(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """A sum over the classes that there are."""
    loss = smooth(x)
    for number in range(5):
        if (y == number).any():
            loss = loss + x[y == number].mean()
    return loss


def last_alone(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    loss, large = smooth(x), y > 8
    if mask.any():
        loss = loss + x[mask].sum()
    if not mask.any() or large.any():
        return loss + x[large].sum()
    return 3 * loss


# --- nothing to be trained --------------------------------------------------------


def early(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    if mask.sum() == 0:
        return x.sum() * 0
    return cross_entropy(x, y)


def else_mean(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    loss = x.sum() * 0.0 if (y != -100).sum() == 0 else cross_entropy(x, y)
    return 2 * loss + smooth(x)


def no_graph(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    if not mask.any():
        return torch.zeros((), requires_grad=True, dtype=x.dtype)
    return cross_entropy(x, y)


def measured(x: Tensor, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
    hits = (x.argmax(-1) == y)[mask]
    part = hits.double().mean() if mask.any() else torch.zeros((), dtype=x.dtype)
    return {"loss": smooth(x) + total(x, y, mask), "hits": part}


# --- numbers that weights decide, of which microbatches have parts ----------------


def scaled(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    largest = x.abs().max()
    if largest > 1.5:
        x = x / largest
    return total(x, y, mask)


def beyond(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    loss = total(x, y, mask)
    if loss > 30:
        loss = loss * 0.5
    return loss


def not_a_number(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    loss = cross_entropy(x, y)
    if torch.isnan(loss).any():
        loss = smooth(x)
    return loss


def clamped(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    x = x.masked_fill(mask[..., None] & (y == 3)[..., None], torch.inf)
    if not torch.isfinite(x).all():
        x = x.clamp(-10, 10)
    return total(x, y, mask)


def by_norm(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    norm = (x * mask[..., None]).norm()
    if norm > 0:
        x = x / norm
    return smooth(x) + total(x, y, mask)


def rooted(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    power = (x.square().sum(-1) * mask).sum()
    return smooth(x) + (power.sqrt() if mask.any() else 0)


def logarithm(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    n, power = mask.sum(), (x.square().sum(-1) * mask).sum()
    if n > 0:
        return (power / n).log()
    return smooth(x)


def largest_row(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    loss = smooth(x)
    if mask.any():
        loss = loss + x[mask].max()
    return loss


def kept_apart(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    loss = total(x, y, mask)
    weight = 1 / loss
    return loss.detach() * smooth(x) + weight if mask.any() else 2 * smooth(x)


# Which microbatches can share out, and which they cannot.
SHARED: tuple[Loss, ...] = (
    *(else_total, else_zero, else_number, no_less_than_one, no_more_than_five),
    *(of_rows, shared_quotient, each_row, beside_rows, counted_rows, two_masks),
    *(two_classes, times_none, several, last_alone),
    *(early, else_mean, no_graph, measured),
)
WHOLE: tuple[Loss, ...] = (
    *(scaled, beyond, not_a_number, clamped, by_norm, rooted, logarithm),
    *(largest_row, kept_apart),
)
