"""A drawn model, its batch and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from drawn_design import Design
from drawn_layers import MIXERS, MLP, NORMS
from torch import Tensor, nn

IGNORED = -100


class Block(nn.Module):
    def __init__(self, d: Design, layer: int) -> None:
        super().__init__()
        self.place, norm = d.place, NORMS[d.norm]
        takes_turns = d.hybrid and layer % 2 == 0
        self.mixer = MIXERS["attention" if takes_turns else d.mixer](d)
        self.mlp = MLP(d)
        self.norm1 = norm(d.width)
        if d.place != "parallel":
            self.norm2 = norm(d.width)
        if d.place == "sandwich":
            self.norm3, self.norm4 = norm(d.width), norm(d.width)
        self.drop = nn.Dropout(d.dropout)
        self.scaled = d.layer_scale
        if self.scaled:
            self.scale1, self.scale2 = (
                nn.Parameter(torch.ones(n)) for n in (d.width, 1)
            )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.place == "parallel":
            y = self.norm1(x)
            return x + self.drop(self.mixer(y, mask)) + self.drop(self.mlp(y))
        if self.place == "post":
            x = self.norm1(x + self.drop(self.mixer(x, mask)))
            return self.norm2(x + self.drop(self.mlp(x)))
        y = self.mixer(self.norm1(x), mask)
        y = self.norm3(y) if self.place == "sandwich" else y
        x = x + self.drop(y * self.scale1 if self.scaled else y)
        y = self.mlp(self.norm2(x))
        y = self.norm4(y) if self.place == "sandwich" else y
        return x + self.drop(y * self.scale2 if self.scaled else y)


class DrawnGPT(nn.Module):
    def __init__(self, d: Design) -> None:
        super().__init__()
        self.d = d
        rows = d.vocab + d.padding
        self.wte = nn.Embedding(rows, d.width)
        if d.positions == "learned":
            self.wpe = nn.Embedding(d.seq + 3, d.width)
        self.blocks = nn.ModuleList(Block(d, i) for i in range(d.layers))
        self.norm = NORMS[d.norm](d.width)
        self.head = nn.Linear(d.width, rows, bias=d.has_bias("head"))
        if d.tied:
            self.head.weight = self.wte.weight

    def logits(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        d = self.d
        x = self.wte(ids)
        if d.embed_scale:
            x = x * d.width**0.5
        if d.positions == "learned":
            x = x + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        y = self.head(self.norm(x))
        if d.padding and d.cropped == "slice":
            y = y[..., : d.vocab]
        elif d.padding:
            absent = torch.arange(y.shape[-1], device=y.device) >= d.vocab
            y = y.masked_fill(absent, torch.finfo(y.dtype).min)
        return 7.0 * torch.tanh(y / 7.0) if d.logits_softcap else y

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        target: Tensor | None = None,
    ) -> Any:
        logits = self.logits(ids, mask)
        if self.d.returns == "logits":
            return logits
        batch = {"labels": labels, "weights": weights, "target": target}
        loss = LOSSES[self.d.loss](logits, batch)
        return {
            "loss": loss,
            "pair": (logits, loss),
            "dict": {"loss": loss, "logits": logits},
        }[self.d.returns]


# --- losses: logits [batch, seq, vocab] and the batch's other fields -> a scalar ------

Batch = Mapping[str, Any]


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


LOOKUPS: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    f.__name__: f
    for f in (cross_entropy, shifted, transposed, by_class, gathered, by_hand, weighted)
}
TARGETS: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    f.__name__: f for f in (squared, squared_by_hand, distilled, divergence)
}
LOSSES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    **LOOKUPS,
    **TARGETS,
    **{f.__name__: f for f in (by_sample, z_loss, smoothed)},
}


# --- a model and a batch -------------------------------------------------------------


class Built(NamedTuple):
    """A model, a batch for it, and how its loss is found (None: it returns it)."""

    model: nn.Module
    batch: dict[str, Tensor]
    loss_fn: Callable[[Any, Batch], Tensor] | None


def build(d: Design, dtype: torch.dtype) -> Built:
    """The model with weights of which none is 0 or 1, and its batch, in a dtype."""
    model = DrawnGPT(d).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if p.ndim < 2:
                # Norms and scales about 1, biases about 0: none of them there.
                drawn = 0.6 + 0.3 * drawn.abs() + 0.05 * drawn
            else:
                drawn = drawn * p.shape[-1] ** -0.5
            p.copy_(drawn)
    return Built(
        model, fields(d, dtype), LOSSES[d.loss] if d.returns == "logits" else None
    )


def fields(d: Design, dtype: torch.dtype) -> dict[str, Tensor]:
    """ids and labels int64 [batch, seq], and what else the model and its loss take."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    shape = (d.batch, d.seq)
    ids = torch.randint(d.vocab, shape, generator=generator)
    found = {"ids": ids}
    if d.padded:
        lengths = torch.tensor([d.seq - 2 * (i % 3) for i in range(d.batch)])
        found["mask"] = (torch.arange(d.seq) < lengths.clamp(min=1)[:, None]).long()
    if d.loss in TARGETS:
        crop = d.padding if d.cropped != "slice" else 0
        found["target"] = draw(*shape, d.vocab + crop)
        return found
    labels = torch.randint(d.vocab, shape, generator=generator)
    if d.ignored == "half":
        labels[: d.batch // 2] = IGNORED
    if d.ignored == "uneven":
        for i in range(d.batch):
            labels[i, : i * (d.seq - 1) // d.batch] = IGNORED
        if d.batch > 1:
            labels[1] = IGNORED
    if d.padded:
        labels[found["mask"] == 0] = IGNORED
    found["labels"] = labels
    if d.loss == "weighted":
        found["weights"] = draw(*shape).abs() + 0.1
    return found
