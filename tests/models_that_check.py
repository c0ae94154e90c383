"""Forwards that look at values, most of them to raise an error. They are in a file of
their own, as pytest writes the asserts of tests anew."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, randomize, token_batch
from torch import Tensor, nn

Look = Callable[[Tensor, Tensor], Tensor]


class Looks(nn.Module):
    """Looks at ids [b, s] and x [b, s, width] in each layer."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.look = look

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = self.look(input_ids, x)
            x = x + layer(x).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def case_of(look: Look) -> Case:
    torch.manual_seed(0)
    batch = {k: v for k, v in token_batch().items() if k in ("input_ids", "labels")}
    return Case(randomize(Looks(look)).double(), batch)


def asserts_none(ids: Tensor, x: Tensor) -> Tensor:
    assert not torch.isnan(x).any()
    return x


def asserts_all(ids: Tensor, x: Tensor) -> Tensor:
    assert (ids < VOCAB).all() and ids.min() >= 0, "ids are those of the vocabulary"
    return x


def asserts_number(ids: Tensor, x: Tensor) -> Tensor:
    assert torch.isfinite(x).all().item()
    return x


def asserts_equal(ids: Tensor, x: Tensor) -> Tensor:
    assert ids.flip(1).sum() == ids.sum(), f"{ids.flip(1).sum()} != {ids.sum()}"
    return x


def tells_values(ids: Tensor, x: Tensor) -> Tensor:
    assert torch.isfinite(x).all(), f"up to {x.abs().max().item():.3f}"
    return x


def raises(ids: Tensor, x: Tensor) -> Tensor:
    if ids.max() >= VOCAB:
        message = f"{ids.max()} is none of {VOCAB}"
        raise IndexError(message)
    return x


def raises_without(ids: Tensor, x: Tensor) -> Tensor:
    if (ids >= 0).sum() == 0:
        raise ValueError
    return x


def counts_rows(ids: Tensor, x: Tensor) -> Tensor:
    odd, even = ids[ids % 2 == 1], ids[ids % 2 == 0]
    (m,), (n,) = odd.shape, even.shape
    assert ids.numel() == m + n, f"{ids.numel()} != {m} + {n}"
    return x


def counts_in_a_number(ids: Tensor, x: Tensor) -> Tensor:
    if (ids >= 0).sum().item() != ids.numel():
        raise ValueError("some of the ids are negative")
    return x


def both(ids: Tensor, x: Tensor) -> Tensor:
    return asserts_none(ids, raises(ids, asserts_all(ids, x)))


CHECKS = (
    *(asserts_none, asserts_all, asserts_number, asserts_equal, tells_values, raises),
    *(raises_without, counts_rows, counts_in_a_number, both),
)


def doubles(ids: Tensor, x: Tensor) -> Tensor:
    return x * 2 if x.mean() > 0 else x


def reads_within(ids: Tensor, x: Tensor) -> Tensor:
    if x.mean() > 0:
        most = x.max().item()
        if most > 1:
            raise ValueError
        return x * most
    return x


def checks_beside(ids: Tensor, x: Tensor) -> Tensor:
    return doubles(ids, asserts_none(ids, x))


def falls(ids: Tensor, x: Tensor) -> Tensor:
    while x.mean() > 0:
        x = x - 1
        if x.min() < -5:
            raise ValueError
    return x


def adds_where_equal(ids: Tensor, x: Tensor) -> Tensor:
    rows = x[ids % 2 == 1]
    if rows.shape[0]:
        x = x + rows.mean()
    if rows.shape[0] == 5:
        x = x + rows.mean()
    return x


DECIDES = doubles, reads_within, checks_beside, falls, adds_where_equal
