"""What public GPT code does: each was once refused, or did not run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, randomize
from torch import Tensor, nn

SAMPLES, SEQ = 4, 6


class Decayed(nn.Module):
    """Layers as lists of their parts, without a module of their own; scores that decay
    by numbers of positions, as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mixers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
            for _ in range(2)
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, place = self.tokens(ids), torch.arange(ids.shape[1])
        decay = (0.9 ** (place[:, None] - place)).tril() / (place / 7 + 1)
        for mixer, mlp in zip(self.mixers, self.mlps, strict=True):
            x = x + decay @ mixer(x)
            x = x + mlp(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def case(model: nn.Module) -> Case:
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (SAMPLES, SEQ))
    return Case(randomize(model), {"ids": ids, "labels": ids.roll(-1, 1)})


def test_layers_of_listed_parts_and_numbers_of_positions_are_proved() -> None:
    case(Decayed()).proved("pp=2,tp=2", 2)
