"""Losses of the tokens that a mask chooses, in all words."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import VOCAB
from torch import Tensor


def of_all(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_chosen(logits: Tensor, labels: Tensor) -> Tensor:
    """Of no mask it is known that it is made as another was."""
    first = F.mse_loss(logits[labels > 9], target=logits.detach().sin()[labels > 9])
    return F.cross_entropy(logits[labels > 9], labels[labels > 9]) + first


def of_two_masks(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits[labels > 9], logits[labels < 9])


def looked_up(logits: Tensor, labels: Tensor) -> Tensor:
    """Labels of tokens that were not chosen are no places of a table."""
    labels = torch.where(labels > 9, labels, -100)
    chosen = labels != -100
    own = logits.log_softmax(-1)[chosen].gather(-1, labels[chosen][:, None])
    return -own.mean()


def written(logits: Tensor, labels: Tensor) -> Tensor:
    """At a place of each token, some counted from the end."""
    mask = labels > 9
    logits = logits - logits.logsumexp(-1, keepdim=True)
    logits[mask] = logits[mask] / 2
    logits[mask, labels[mask] - 5] = 0.3
    logits[mask, labels[mask] - VOCAB] *= 3
    row, column = torch.where(~mask)
    logits[row, column, labels[row, column]] += 1
    return logits.square().mean()


def after_chosen(logits: Tensor, labels: Tensor) -> Tensor:
    """The last row has none after it."""
    rows, last = logits.flatten(0, 1), labels.numel() - 1
    mask = (labels.flatten() > 9) & (torch.arange(last + 1) < last)
    place = mask.nonzero().squeeze(-1)
    return rows[place + 1].square().mean() + of_all(logits, labels)


def in_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses of chosen rows, each a mean or divided by how many there are."""
    mask = labels > 9
    x, y = logits[mask], labels[mask]
    first, wanted = x[:, 0], (y % 2).to(x.dtype)
    return (
        F.mse_loss(first, wanted)
        + F.binary_cross_entropy_with_logits(first, wanted)
        + F.kl_div(x.log_softmax(-1), x.detach().softmax(-1) / 2, reduction="batchmean")
        + F.cross_entropy(x, y, reduction="none").mean()
        + F.normalize(x, dim=-1).sum() / x.shape[0]
        + x.std(-1).sum() / x.numel()
        + x.logsumexp(-1).square().mean()
    )


def of_all_rows(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = labels.flatten() > 9
    places = torch.arange(labels.numel(), dtype=torch.int32)[chosen]
    thirds = torch.arange(labels.numel(), dtype=logits.dtype)[chosen] / 3
    x = logits.flatten(0, 1)[chosen]
    norms = x.norm() + torch.linalg.vector_norm(x[:, None], 1) + x[:, 0].norm(3)
    return norms + x.max() + (x[:, 0] * places / thirds.add(1)).sum()


def mean_of_chosen(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits.mT, labels, reduction="none")
    return (
        each.masked_select(labels > 9).mean() + logits[labels > 9].square().sum() / 1000
    )


def of_zeros(logits: Tensor, labels: Tensor) -> Tensor:
    """Derivatives at rows that were not chosen are infinite, or no numbers."""
    mask = labels > 9
    x = (logits * mask[..., None])[mask]
    size = x.square().sum(-1)
    losses = size.sqrt(), size.rsqrt(), x.abs() ** 0.5, x.square().log() / size[:, None]
    return torch.stack([loss.mean() for loss in losses]).sum()


def of_gaps(logits: Tensor, labels: Tensor) -> Tensor:
    """What is wanted of rows that were not chosen is no number."""
    wanted = torch.where(labels > 9, labels.to(logits.dtype), torch.nan)
    mask = ~wanted.isnan()
    return (logits[mask].mean(-1) - wanted[mask]).square().mean()


def of_numbers(logits: Tensor, labels: Tensor) -> Tensor:
    """Labels of tokens that were not chosen are no classes, and divide nothing."""
    labels = torch.where(labels > 9, labels, -100)
    mask = labels != -100
    own = F.one_hot(labels[mask], VOCAB) * logits[mask]
    return own.mean() + (own.sum(-1) * (100 // (labels + 100)[mask])).mean()
