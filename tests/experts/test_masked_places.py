"""What is written where a mask is set, the first value where it first is: features of
images into a text, all of them or those that another mask chooses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn

SEQ, WIDTH, VOCAB, IMAGE = 8, 12, 16, 1

Write = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # x, mask, features, kept


def set_all(x, mask, features, kept):
    x = x.clone()
    x[mask] = features.flatten(0, 1)
    return x


def scattered_rows(x, mask, features, kept):
    return x.masked_scatter(mask[..., None].expand_as(x), features)


def scattered_in_place(x, mask, features, kept):
    x = x.clone()
    x.masked_scatter_(mask[..., None], features.repeat(1, 2, 1))  # of which half
    return x


def scattered_elements(x, mask, features, kept):
    even = torch.arange(WIDTH) % 2 == 0
    return x.masked_scatter(mask[..., None] & even, features[..., ::2])


def scattered_in_columns(x, mask, features, kept):
    return x.masked_scatter(torch.arange(WIDTH) < 3, features.repeat(1, 1, 2))


def set_kept(x, mask, features, kept):
    x, features = x.clone(), features * 2
    x[mask & kept_of(mask, kept)] = features[kept]
    return x


def scattered_kept(x, mask, features, kept):
    mask = (mask & kept_of(mask, kept))[..., None]
    return x.masked_scatter(mask.expand_as(x), features[kept].tanh())


def kept_of(mask: Tensor, kept: Tensor) -> Tensor:
    """As many places of a mask as are kept, the last ones."""
    number = mask.flatten().cumsum(0).view_as(mask)
    return number > mask.sum() - kept.sum()


def moved_to_the_front(x, mask, features, kept):
    front = torch.arange(SEQ) < mask.sum(1, keepdim=True)
    packed = torch.zeros_like(x)
    packed[front] = x[mask]
    x = x.clone()
    x[mask] = packed[front].tanh()
    return x


WRITES: list[Write] = [
    set_all,
    scattered_rows,
    scattered_in_place,
    scattered_elements,
    scattered_in_columns,
    set_kept,
    scattered_kept,
]


class Sees(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.embed, self.see = nn.Embedding(VOCAB, WIDTH), nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head, self.write = nn.Linear(WIDTH, VOCAB), write

    def forward(self, ids, labels, images, kept):
        x = self.write(self.embed(ids), ids == IMAGE, self.see(images), kept)
        for layer in self.layers:
            x = x + layer(x).relu()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    ids, images = torch.randint(2, VOCAB, (4, SEQ)), torch.randn(4, 3, 6)
    for sample, many in enumerate((5, 0, 4, 3)):  # not as many as there are features
        ids[sample, 2 : 2 + many] = IMAGE
    kept = torch.tensor([[0, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]]).bool()
    return {"ids": ids, "labels": ids.roll(-1, 1), "images": images, "kept": kept}


@pytest.mark.matrix(quick=6, daily=14)
@pytest.mark.parametrize(
    ("mesh", "microbatches"), [("dp=2", 2), ("tp=2", 2), ("cp=2", 1), ("pp=2", 2)]
)
@pytest.mark.parametrize("write", WRITES)
def test_values_are_where_a_mask_is_set(write, mesh: str, microbatches: int) -> None:
    cuts = ("layers.1",) if mesh == "pp=2" else ()
    Case(Sees(write), batch()).verify(mesh, microbatches, cuts=cuts)


@pytest.mark.parametrize("mesh", ["dp=2", "cp=2"])
def test_rows_move_from_one_mask_to_another(mesh: str) -> None:
    Case(Sees(moved_to_the_front), batch()).verify(mesh)
