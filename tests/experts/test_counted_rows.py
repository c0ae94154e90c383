"""Rows looked up or written to by numbers that count stay with whoever has them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn

from autopar.passes.capture.normalize.counted_rows import Count, count_of

WIDTH, VOCAB = 8, 16
LOOK_UPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, WIDTH)),
    "of two dims": lambda x, i: x[i.view(2, -1)].flatten(0, 1),
}
WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_put": lambda y, i, x: y.index_put((i,), x),
    "index_copy": lambda y, i, x: y.index_copy(0, i, x),
    "scatter": lambda y, i, x: y.scatter(0, i[:, None].expand(-1, WIDTH), x),
}
ADDS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda y, i, x: y.index_add(0, i, x),
    "scatter_add": lambda y, i, x: y.scatter_add(0, i[:, None].expand(-1, WIDTH), x),
    "accumulated": lambda y, i, x: y.index_put((i,), x, accumulate=True),
}


class Counted(nn.Module):
    """Looks all tokens up, and writes them, in one of many ways."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.look_up = LOOK_UPS[draw.choice(list(LOOK_UPS))]
        adds = draw.random() < 0.7
        ways = ADDS if adds else WRITES
        self.write = ways[draw.choice(list(ways))]
        self.rounds = draw.choice([1, 2, 3]) if adds else 1
        self.times = draw.choice([1, 2]) if adds else 1
        self.onto = draw.choice([torch.clone, torch.zeros_like])
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        rows = torch.arange(ids.numel()).repeat(self.rounds)
        rows = rows.repeat_interleave(self.times)
        y = torch.tanh(self.up(self.look_up(x, rows)))
        x = self.write(self.onto(x), rows, y)
        return F.cross_entropy(x @ self.embed.weight.T, labels.flatten())


@pytest.mark.parametrize("seed", range(6))
def test_a_draw_is_right_with_rows_apart(seed: int) -> None:
    torch.manual_seed(seed)
    batch = {n: torch.randint(0, VOCAB, (4, 6)) for n in ("ids", "labels")}
    # Microbatches have no rows of each other.
    Case(Counted(seed), batch).double().verify("dp=2", microbatches=2)


COUNTS: Mapping[tuple[int, ...], Any] = {
    (0, 1, 2, 3): Count(0, 4, 1, 1),
    (2, 3): Count(2, 4, 1, 1),
    (-2, -1): Count(3, 5, 1, 1),
    (1, 2, 1, 2): Count(1, 3, 2, 1),
    (0, 0, 1, 1): Count(0, 2, 1, 2),
    (1, 1, 2, 2, 1, 1, 2, 2): Count(1, 3, 2, 2),
    (3, 3, 3): Count(3, 4, 1, 3),
    (1, 0): None,
    (0, 2, 4): None,
    (0, 1, 1): None,
    (0, 0, 1, 2): None,
    (4, 0): None,
    (): None,
}


@pytest.mark.parametrize("numbers", COUNTS)
def test_numbers_that_count(numbers: tuple[int, ...]) -> None:
    assert count_of(torch.tensor(numbers, dtype=torch.int64), 5) == COUNTS[numbers]
