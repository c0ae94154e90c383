"""A drawn model, its batch and its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from drawn_design import Design
from drawn_layers import MLP, NORMS, Experts
from drawn_losses import IGNORED, LOSSES, TARGETS, Batch
from drawn_mixers import MIXERS
from torch import Tensor, nn

NOISES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "jitter": lambda y: y * torch.empty_like(y).uniform_(0.9, 1.1),
    "normal": lambda y: y + 0.1 * torch.randn_like(y),
    "path": lambda y: y * (torch.rand(len(y), 1, 1, device=y.device) < 0.8),
    "tokens": lambda y: y * torch.rand(y.shape[:2], device=y.device)[..., None],
    "features": lambda y: y + y.new_empty(y.shape[-1]).exponential_(10.0),
}


class Block(nn.Module):
    def __init__(self, d: Design, layer: int) -> None:
        super().__init__()
        self.place, self.residual, norm = d.place, d.residual, NORMS[d.norm]
        takes_turns = d.hybrid and layer % 2 == 0
        self.mixer = MIXERS["attention" if takes_turns else d.mixer](d)
        self.mlp = Experts(d) if "experts" in d.mlp else MLP(d)
        self.norm1 = norm(d.width)
        if d.place != "parallel":
            self.norm2 = norm(d.width)
        if d.place == "sandwich":
            self.norm3, self.norm4 = norm(d.width), norm(d.width)
        self.drop, self.noise = nn.Dropout(d.dropout), d.noise
        if self.residual in ("scaled", "gated"):
            self.scale1 = nn.Parameter(torch.ones(d.width))
            if d.place != "parallel":
                self.scale2 = nn.Parameter(torch.ones(1))

    def add(self, x: Tensor, y: Tensor, scale: str) -> Tensor:
        y = NOISES[self.noise](self.drop(y))
        if self.residual == "scaled":
            return x + y * getattr(self, scale)
        if self.residual == "gated":
            return torch.lerp(x, y, torch.sigmoid(getattr(self, scale)))
        if self.residual == "deep":
            return 1.3 * x + y / 1.7
        return x + y

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.place == "parallel":
            y = self.norm1(x)
            return self.add(x, self.mixer(y, mask) + self.mlp(y), "scale1")
        if self.place == "post":
            x = self.norm1(self.add(x, self.mixer(x, mask), "scale1"))
            return self.norm2(self.add(x, self.mlp(x), "scale2"))
        y = self.mixer(self.norm1(x), mask)
        y = self.norm3(y) if self.place == "sandwich" else y
        x = self.add(x, y, "scale1")
        y = self.mlp(self.norm2(x))
        y = self.norm4(y) if self.place == "sandwich" else y
        return self.add(x, y, "scale2")


class DrawnGPT(nn.Module):
    def __init__(self, d: Design) -> None:
        super().__init__()
        self.d = d
        rows = d.vocab + d.padding
        self.wte = nn.Embedding(rows, d.width)
        if d.positions == "learned":
            self.wpe = nn.Embedding(d.seq + 3, d.width)
        if d.memory:
            self.memory = nn.Parameter(torch.zeros(d.memory, d.width))
        blocks = [Block(d, i) for i in range(d.layers)]
        self.blocks = nn.ModuleList(blocks[:1] * d.layers if d.shared else blocks)
        self.norm = NORMS[d.norm](d.width)
        if d.residual == "streams":
            self.streams = nn.Parameter(torch.zeros(2, 2))
        if d.tied and d.head != "linear":
            return
        self.head = nn.Linear(d.width, rows, bias=d.has_bias("head"))
        if d.tied:
            self.head.weight = self.wte.weight

    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        first, before = x, []
        both = torch.stack((x, x.flip(-1)), 2) if self.d.residual == "streams" else None
        for i, block in enumerate(self.blocks):
            if (
                both is not None
            ):  # two residual streams that exchange (hyper-connections)
                x = block(both.mean(2), mask)
                mixed = torch.einsum("bsnw,nm->bsmw", both, self.streams.softmax(0))
                both = mixed + x[:, :, None]
                continue
            if self.d.residual == "skips" and i >= (self.d.layers + 1) // 2:
                x = x + before.pop()  # as in a U-net
            x = block(x, mask)
            before.append(x)
            if self.d.residual == "first":
                x = x + 0.3 * first
        return x if both is None else both.sum(2)

    def logits(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        d = self.d
        x = self.wte(ids)
        if d.embed_scale:
            x = x * d.width**0.5
        if d.positions == "learned":
            x = x + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        if d.memory:
            x = torch.cat((self.memory.expand(ids.shape[0], -1, -1), x), 1)
            if mask is not None:
                mask = F.pad(mask, (d.memory, 0), value=1)
        x = self.norm(self.run_blocks(x, mask)[:, d.memory :])
        y = self.read(x)
        if d.padding and d.cropped == "slice":
            y = y[..., : d.vocab]
        elif d.padding:
            absent = torch.arange(y.shape[-1], device=y.device) >= d.vocab
            y = y.masked_fill(absent, -1e4)
        return 7.0 * torch.tanh(y / 7.0) if d.logits_softcap else y

    def read(self, x: Tensor) -> Tensor:
        if not self.d.tied or self.d.head == "linear":
            return self.head(x)
        if self.d.head == "matmul":
            return x @ self.wte.weight.t()
        return torch.einsum("bsw,vw->bsv", x, self.wte.weight)

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
        model,
        fields(d, dtype),
        LOSSES[d.loss] if d.returns == "logits" else None,
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
