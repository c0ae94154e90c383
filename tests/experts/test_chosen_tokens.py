"""Mixtures of depths (arXiv:2404.02258): a router chooses tokens of each sample, which
are worked on and written back, in every spelling that people have for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn

BATCH, SEQ, WIDTH, VOCAB, CHOSEN = 8, 12, 16, 32, 4

Write = Callable[[Tensor, Tensor, Tensor], Tensor]  # x, numbers [batch, chosen], new


def samples(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)[:, None]


def spread(numbers: Tensor) -> Tensor:
    return numbers[..., None].expand(-1, -1, WIDTH)


def set_in_new(x: Tensor, numbers: Tensor, new: Tensor) -> Tensor:
    written = torch.zeros_like(x)
    written[samples(x), numbers] = new
    return x + written


def set_in_place(x: Tensor, numbers: Tensor, new: Tensor) -> Tensor:
    x = x.clone()
    x[samples(x), numbers] += new
    return x


def number_for_all(x: Tensor, numbers: Tensor, new: Tensor) -> Tensor:
    hidden = torch.ones_like(x)
    hidden[samples(x), numbers - SEQ] = 0.5
    return x * hidden + new.mean(1, keepdim=True)


def accumulated(x: Tensor, numbers: Tensor, new: Tensor) -> Tensor:
    return x.index_put((samples(x), numbers), new, accumulate=True)


def added_by_scatter(x: Tensor, numbers: Tensor, new: Tensor) -> Tensor:
    return x.scatter_add(1, spread(numbers), new)


def set_by_scatter(x: Tensor, numbers: Tensor, new: Tensor) -> Tensor:
    return x + torch.zeros_like(x).scatter(1, spread(numbers), new)


WRITES = [
    set_in_new,
    set_in_place,
    number_for_all,
    accumulated,
    added_by_scatter,
    set_by_scatter,
]


class Depths(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.routers = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer, router in zip(self.layers, self.routers, strict=True):
            weights, numbers = router(x).squeeze(-1).topk(CHOSEN, dim=-1)
            chosen = x[samples(x), numbers]
            new = layer(chosen) * weights.sigmoid()[..., None]
            x = self.write(x, numbers, new)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.matrix(quick=6, daily=14)
@pytest.mark.parametrize(
    ("mesh", "microbatches"), [("dp=2", 2), ("tp=2", 2), ("cp=2", 1), ("pp=2", 2)]
)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_chosen_is_written_back(write, mesh: str, microbatches: int) -> None:
    ids = torch.randint(VOCAB, (BATCH, SEQ))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    cuts = ("layers.1",) if mesh == "pp=2" else ()
    Case(Depths(write), batch).verify(mesh, microbatches, cuts=cuts)
