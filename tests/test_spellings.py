"""Spellings that models are published in: split like the plain one, and equal to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import WIDTH, Block, Case, Stack, randomize, token_batch
from torch import Tensor, nn

from passes.program import Program

HEADS, SIZE, GROUPS, FFN = 4, 8, 2, 48


def loss_of(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    )


def case(block: Callable[[], nn.Module]) -> Case:
    torch.manual_seed(0)
    return Case(randomize(Stack(block, 2)), token_batch(), loss_of).double()


def whole(program: Program) -> set[str]:
    """Matrices of the first layer that no rank of tp has a share of."""
    return {
        name.removeprefix("blocks.0.")
        for name, spec in program.parameters.items()
        if name.startswith("blocks.0.")
        and len(spec.shape) > 1
        and "tp" not in spec.split_axes
    }


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [b, s, h, d], k and v [b, s, g, d] -> [b, s, h d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


class Fused(Block):
    """Grouped queries in one projection, cut into three in one of these ways."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.cut = cut
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * GROUPS * SIZE)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.reshape(*x.shape[:2], -1, SIZE) for y in CUTS[self.cut](self.qkv(x))
        )
        return self.out(attend(q, k, v))


CUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "split": lambda y: y.split([WIDTH, 16, 16], -1),
    "tensor_split": lambda y: y.tensor_split((WIDTH, WIDTH + 16), -1),
    "slices": lambda y: (y[..., :WIDTH], y[..., WIDTH:-16], y[..., -16:]),
    "heads": lambda y: y.unflatten(-1, (-1, SIZE)).split([HEADS, 2, 2], 2),
}


class Parallel(nn.Module):
    """Attention and MLP side by side, in one product before and one after."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 3 * WIDTH + FFN)
        self.last = nn.Linear(WIDTH + FFN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        *qkv, up = self.first(self.norm(x)).split([WIDTH, WIDTH, WIDTH, FFN], -1)
        y = attend(*(p.unflatten(-1, (HEADS, SIZE)) for p in qkv))
        return x + self.last(torch.cat([y, F.gelu(up)], -1))


UNEVEN: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    **{name: (partial(Fused, name), {"qkv.weight"}) for name in CUTS},
    "parallel": (Parallel, {"first.weight", "last.weight"}),
}


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("name", UNEVEN)
def test_work_of_uneven_pieces_is_split_and_a_note_says_what_is_not(name: str) -> None:
    block, held = UNEVEN[name]
    one = case(block)
    program = one.compile("tp=2")
    assert whole(program) == held
    (note,) = program.notes
    names = ", ".join(f"blocks.*.{weight}" for weight in sorted(held))
    assert note.startswith(f"tp splits the work of {names}, but its ranks all hold")
    one.verify("dp=2,pp=2,tp=2", 2)


class Gated(Block):
    """A gated unit whose halves come out of one product."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit
        self.up, self.down = nn.Linear(WIDTH, 2 * FFN), nn.Linear(FFN, WIDTH)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(UNITS[self.unit](self.up(x)))


UNITS: dict[str, Callable[[Tensor], Tensor]] = {
    "slices": lambda y: F.silu(y[..., :FFN]) * y[..., FFN:],
    "glu": F.glu,
}


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("name", UNITS)
def test_even_pieces_stay_one_split_weight(name: str) -> None:
    one = case(partial(Gated, name))
    program = one.compile("tp=2")
    assert whole(program) == set() and program.notes == ()
    one.verify("pp=2,tp=2", 2)
