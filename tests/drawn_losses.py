"""Losses of drawn models: logits [batch, seq, vocab] and a batch -> a scalar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100

Batch = Mapping[str, Any]
Loss = Callable[[Tensor, Batch], Tensor]


def cross_entropy(logits: Tensor, batch: Batch, **options: Any) -> Tensor:
    labels = batch["labels"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, **options)


def shifted(logits: Tensor, batch: Batch) -> Tensor:
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())


def transposed(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"])


def z_loss(logits: Tensor, batch: Batch) -> Tensor:
    size = logits.logsumexp(-1).square().mean()
    return cross_entropy(logits, batch) + 0.05 * size


def smoothed(logits: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(logits, batch, label_smoothing=0.2)


def by_class(logits: Tensor, batch: Batch) -> Tensor:
    """Each token of the vocabulary has a weight of its own."""
    weight = torch.linspace(0.5, 1.5, logits.shape[-1], dtype=logits.dtype)
    return cross_entropy(logits, batch, weight=weight)


def gathered(logits: Tensor, batch: Batch) -> Tensor:
    labels = batch["labels"]
    keep = labels != IGNORED
    rows = F.log_softmax(logits, -1)
    found = rows.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(found * keep).sum() / keep.sum()


def by_hand(logits: Tensor, batch: Batch) -> Tensor:
    """A sum of exponentials, and a lookup of what is not normed."""
    labels = batch["labels"]
    keep = (labels != IGNORED).to(logits.dtype)
    found = torch.take_along_dim(logits, labels.clamp(min=0)[..., None], -1)[..., 0]
    return ((logits.logsumexp(-1) - found) * keep).sum() / keep.sum().clamp(min=1.0)


def weighted(logits: Tensor, batch: Batch) -> Tensor:
    labels, weights = batch["labels"].flatten(), batch["weights"].flatten()
    each = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
    return (each * weights).sum() / weights.sum()


def by_sample(logits: Tensor, batch: Batch) -> Tensor:
    """The mean over samples of what the tokens of each lose on average."""
    labels = batch["labels"]
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    count = (labels != IGNORED).sum(1)
    return (each.sum(1) / (count + 1)).mean()


def squared(logits: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(logits, batch["target"])


def squared_by_hand(logits: Tensor, batch: Batch) -> Tensor:
    return (logits - batch["target"]).pow(2).mean()


def distilled(logits: Tensor, batch: Batch) -> Tensor:
    """The cross entropy with what a teacher finds probable."""
    wanted = batch["target"].softmax(-1)
    return -(wanted * logits.log_softmax(-1)).sum(-1).mean()


def divergence(logits: Tensor, batch: Batch) -> Tensor:
    wanted = batch["target"].log_softmax(-1)
    found = logits.log_softmax(-1)
    return F.kl_div(found, wanted, reduction="batchmean", log_target=True)


def summed(logits: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(logits, batch, reduction="sum")


def focal(logits: Tensor, batch: Batch) -> Tensor:
    """Tokens that are found probable count less."""
    labels = batch["labels"].flatten()
    each = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
    return ((1 - torch.exp(-each)).square() * each).mean()


def chunked(logits: Tensor, batch: Batch) -> Tensor:
    """A few positions at a time, as where the vocabulary is large."""
    labels = batch["labels"]
    total = logits.new_zeros(())
    for some, wanted in zip(logits.split(3, 1), labels.split(3, 1), strict=True):
        total = total + F.cross_entropy(
            some.flatten(0, 1), wanted.flatten(), reduction="sum"
        )
    return total / (labels != IGNORED).sum()


def pooled(logits: Tensor, batch: Batch) -> Tensor:
    """One class for each sample."""
    return F.cross_entropy(logits.mean(1), batch["target"][:, 0].argmax(-1))


def last(logits: Tensor, batch: Batch) -> Tensor:
    """One number for each sample, of its last token (a reward)."""
    return F.mse_loss(logits[:, -1, 0], batch["target"][:, 0, 0])


def pairs(logits: Tensor, batch: Batch) -> Tensor:
    """A loss by which the first of two samples should have the greater reward."""
    reward = logits[:, -1, 0]
    return -F.logsigmoid(reward[0::2] - reward[1::2]).mean()


def contrast(logits: Tensor, batch: Batch) -> Tensor:
    """Each sample against all others (SimCSE)."""
    x = F.normalize(logits.mean(1), dim=-1)
    y = F.normalize(logits[:, -1], dim=-1)
    return F.cross_entropy(x @ y.t() / 0.5, torch.arange(x.shape[0], device=x.device))


def binary(logits: Tensor, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, batch["target"].sigmoid())


def smooth(logits: Tensor, batch: Batch) -> Tensor:
    return F.smooth_l1_loss(logits, batch["target"])


def entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Cross entropy, and a bonus for what is undecided."""
    rows = logits.log_softmax(-1)
    return cross_entropy(logits, batch) + 0.1 * (rows.exp() * rows).sum(-1).mean()


LOOKUPS: dict[str, Loss] = {
    f.__name__: f
    for f in (
        cross_entropy, shifted, transposed, by_class, gathered, by_hand, weighted,
        summed, focal, chunked,
    )
}  # fmt: skip
TARGETS: dict[str, Loss] = {
    f.__name__: f
    for f in (
        squared, squared_by_hand, distilled, divergence, pooled, last, binary, smooth,
    )
}  # fmt: skip
PAIRS: dict[str, Loss] = {f.__name__: f for f in (pairs, contrast)}
LOSSES: dict[str, Loss] = {
    **LOOKUPS,
    **TARGETS,
    **PAIRS,
    **{f.__name__: f for f in (by_sample, z_loss, smoothed, entropy)},
}
