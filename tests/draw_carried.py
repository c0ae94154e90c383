"""Models whose layers hand over more than one tensor, share weights, or are trained in
part."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case
from draw_layers import MESHES, VOCAB, WIDTH
from torch import Tensor, nn

from autopar.passes.program import Program

HEADS, RANK, STREAMS = 4, 4, 2
TUNED = "adapters on some layers, all else frozen"
FROZEN = "the embeddings and the first layers are frozen"
EXITS = "a loss after some layers"
STATE = "a running mean beside the stream"
VALUES = "the first layer's values in all"
BORROWED = "keys and values of a layer before"
GROUPS = "several layers in a row have the same weights"
DEPTHS = "a learned vector for each layer, looked up"
SCALED = "a number that no two layers share"
STRAY = (
    "some layers without a pattern look at all that is before, the others at a window"
)
HYPER = "several streams, mixed between layers"
GATED = "one gate over two streams, of which one is made anew"
HABITS = (
    TUNED,
    FROZEN,
    EXITS,
    STATE,
    VALUES,
    BORROWED,
    GROUPS,
    DEPTHS,
    SCALED,
    STRAY,
    HYPER,
    GATED,
)


class Adapted(nn.Module):
    """A product, and beside it one of low rank where there is an adapter."""

    def __init__(self, width: int, out: int, has_adapter: bool) -> None:
        super().__init__()
        self.base = nn.Linear(width, out)
        self.a = nn.Linear(width, RANK, bias=False) if has_adapter else None
        self.b = nn.Linear(RANK, out, bias=False) if has_adapter else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y if self.a is None or self.b is None else y + self.b(self.a(x))


class Layer(nn.Module):
    """Attention over a window, or over all that is before, and a feed-forward block."""

    def __init__(self, has_adapter: bool, window: int, scale: float) -> None:
        super().__init__()
        self.window, self.scale = window, scale
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (
            Adapted(WIDTH, WIDTH, has_adapter and name in "qv") for name in "qkvo"
        )
        self.up = Adapted(WIDTH, 4 * WIDTH, has_adapter)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        return self.heads(self.k(h)), self.heads(self.v(h))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = self.heads(self.q(self.first(x)))
        length, options = x.shape[1], dict[str, Any](is_causal=True)
        if self.window:
            at = torch.arange(length, device=x.device)
            far = at[:, None] - at
            options = {"attn_mask": (far >= 0) & (far < self.window)}
        y = F.scaled_dot_product_attention(q, keys, values, **options)
        x = x + self.scale * self.o(y.transpose(1, 2).flatten(2))
        return x + self.scale * self.down(torch.relu(self.up(self.second(x))))


class Carrying(nn.Module):
    """habits: some of `HABITS`. far: how far apart layers that have something are.
    stray: the layers that look at all that is before."""

    def __init__(
        self, count: int, habits: Collection[str], far: int, stray: Collection[int]
    ) -> None:
        super().__init__()
        self.habits, self.far, self.n_layer = (*habits,), far, count
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            Layer(
                has_adapter=TUNED in habits and i % far == 1,
                window=5 if STRAY in habits and i not in stray else 0,
                scale=1 / math.sqrt(1 + i) if SCALED in habits else 1.0,
            )
            for i in range(self.owner(count - 1) + 1)
        )
        self.depths = nn.Embedding(count, WIDTH) if DEPTHS in habits else None
        self.mix = nn.Parameter(torch.rand(count))
        self.streams = nn.Parameter(torch.eye(STREAMS).repeat(count, 1, 1))
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        if TUNED in habits:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".a." in name or ".b." in name)
        if FROZEN in habits:
            for module in (self.embed, *self.layers[: len(self.layers) // 2]):
                module.requires_grad_(False)

    def owner(self, i: int) -> int:
        """The layer whose weights the i-th has."""
        return i // self.far if GROUPS in self.habits else i

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def forward(self, ids: Tensor) -> Tensor:
        has, loss = self.habits, torch.zeros((), device=ids.device)
        x = self.embed(ids)
        state = torch.zeros_like(x)
        streams = x.unsqueeze(2).expand(-1, -1, STREAMS, -1)
        keys = values = first = None
        for i in range(self.n_layer):
            layer = self.layers[self.owner(i)]
            if HYPER in has:
                streams = torch.einsum("bsnd,nm->bsmd", streams, self.streams[i])
                x = streams[:, :, 0]
            if self.depths is not None:
                x = x + self.depths(torch.tensor(i, device=x.device))
            if (
                keys is None
                or values is None
                or BORROWED not in has
                or not i % self.far
            ):
                keys, values = layer.keys_and_values(x)
            if VALUES in has:
                first = values if first is None else first
                values = torch.lerp(first, values, self.mix[i])
            x = layer(x, keys, values)
            if STATE in has:
                state = torch.lerp(state, x, self.mix[i].sigmoid())
                x = x + state.sin()
            if GATED in has:
                gate = self.gate(x).sigmoid()
                x, state = gate * x + (1 - gate) * state, torch.tanh(x)
            if HYPER in has:
                streams = streams + x.unsqueeze(2) * self.mix[i]
            if EXITS in has and i % self.far == 1:
                loss = loss + 0.1 * self.loss(x, ids)
        x = x + streams.mean(2) if HYPER in has else x
        return loss + self.loss(x, ids)


@dataclass
class Drawn:
    """cut: where the second stage begins; see `Carrying`."""

    count: int
    habits: Collection[str]
    far: int
    stray: Collection[int]
    cut: int
    mesh: str
    options: dict[str, Any]

    @classmethod
    def of(cls, seed: int, counts: Sequence[int] = range(6, 19)) -> Drawn:
        draw = random.Random(seed)
        count, far = draw.choice(counts), draw.randint(2, 4)
        stray = draw.sample(range(count), draw.randint(1, count // 2))
        habits = draw.sample(HABITS, draw.randint(1, 3))
        cut = count // 2 + draw.randint(-1, 1)
        if GROUPS in habits:
            cut = -(-cut // far)
        return cls(count, habits, far, stray, cut, *draw.choice(MESHES))

    def compiled(self) -> tuple[Case, Program]:
        model = Carrying(self.count, self.habits, self.far, self.stray)
        case = Case(model, {"ids": torch.randint(VOCAB, (16, 12))})
        cuts = (f"layers.{self.cut}",) if "pp" in self.mesh else ()
        return case, case.compile(self.mesh, 2, cuts=cuts, **self.options)
