"""Models of layers in a pattern, which read more than what the layer before gives."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn

from autopar.passes.program import Program

WIDTH, VOCAB = 24, 48
MIXERS = ("plain", "gated", "norm", "deep")
MESHES: Sequence[tuple[str, dict[str, Any]]] = (
    ("dp=2", {"zero": 1}),
    ("dp=2", {"zero": 3}),
    ("dp=2", {"zero": 1, "recompute": "selective"}),
    ("tp=2", {}),
    ("cp=2", {"zero": 1}),
    ("dp=2,tp=2", {"zero": 1}),
    ("tp=2,dp=2", {"zero": 3}),
    ("dp=2,pp=2", {"zero": 1}),
    ("dp=2,pp=2", {"zero": 2}),
    ("dp=2,pp=2", {"zero": 3}),
    ("dp=2,pp=2", {"schedule": "zb-h1"}),
    ("dp=2,pp=2,tp=2", {"zero": 1}),
)
# What layers read, or the model of them.
SKIP = "what a layer a few before gave"
SHARED = "a block that stands behind several layers"
KEPT = "what the last layer of the first kind gave"
ROUTERS = "a loss of most layers"
UNET = "what the layer as far from the first gave, as this one is from the last"
SCALES = "a number of one parameter for all"
MEAN = "the mean of what all gave"
EMBEDDED = "the embeddings again"
TWICE = "every second layer runs twice"
READS = (SKIP, SHARED, KEPT, ROUTERS, UNET, SCALES, MEAN, EMBEDDED, TWICE)


class Mixer(nn.Module):
    """A feed-forward block of one of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH) if kind == "gated" else None
        self.norm = nn.LayerNorm(WIDTH) if kind == "norm" else None
        self.inner = nn.Linear(4 * WIDTH, 4 * WIDTH) if kind == "deep" else None

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.norm is None else self.norm(x)
        y = torch.tanh(self.up(h))
        if self.gate is not None:
            y = y * self.gate(h)
        if self.inner is not None:
            y = torch.relu(self.inner(y))
        return x + self.down(y)


class Attention(nn.Module):
    """Grouped queries, causal, with a norm before."""

    def __init__(self, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        size = WIDTH // heads
        self.q, self.o = nn.Linear(WIDTH, heads * size), nn.Linear(heads * size, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, kv_heads * size) for _ in range(2))
        self.heads = heads, kv_heads

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        counts = self.heads[0], *(2 * self.heads[1:])
        q, k, v = (
            part(h).unflatten(-1, (count, -1)).transpose(1, 2)
            for part, count in zip((self.q, self.k, self.v), counts, strict=True)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


class Reading(nn.Module):
    """kinds: of its layers. reads: some of `READS`. far: as many layers before."""

    def __init__(self, kinds: Sequence[str], reads: Collection[str], far: int) -> None:
        super().__init__()
        count = len(kinds)
        self.kinds, self.reads, self.far = (*kinds,), (*reads,), far
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            Attention() if kind == "attention" else Mixer(kind) for kind in kinds
        )
        self.block = Mixer("plain") if SHARED in reads else None
        self.routers = nn.ModuleList(
            nn.Linear(WIDTH, 4) for i in range(count * (ROUTERS in reads)) if i % far
        )
        self.joins = nn.ModuleList(
            nn.Linear(2 * WIDTH, WIDTH) for _ in range(count // 2 * (UNET in reads))
        )
        self.scales = nn.Parameter(torch.rand(count))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        reads, count = self.reads, len(self.layers)
        x = embedded = kept = self.embed(ids)
        given: list[Tensor] = []
        routed: Tensor | float = 0.0
        for i, layer in enumerate(self.layers):
            if UNET in reads and i >= count - count // 2:
                both = torch.cat([x, given[count - 1 - i]], -1)
                x = self.joins[i - (count - count // 2)](both)
            for _ in range(1 + (TWICE in reads and i % 2)):
                x = layer(x)
            if SKIP in reads and i >= self.far:
                x = x + 0.5 * given[i - self.far]
            if self.block is not None and i % self.far == 1:
                x = self.block(x)
            if SCALES in reads:
                x = x * self.scales[i]
            if KEPT in reads and self.kinds[i] == self.kinds[0]:
                kept = x.sin()
            elif KEPT in reads:
                x = x + kept
            if EMBEDDED in reads and i % 3 == 2:
                x = x + embedded.cos()
            if ROUTERS in reads and i % self.far:
                chosen = self.routers[i - 1 - i // self.far](x).softmax(-1)
                routed = routed + chosen.square().mean()
            given.append(x)
        if MEAN in reads:
            x = sum(a * y for a, y in zip(self.scales.softmax(0), given, strict=True))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()) + 0.01 * routed


@dataclass
class Drawn:
    """first: kinds of the first layers; period: of those that repeat after them. cut:
    where the second stage begins."""

    first: Sequence[str]
    period: Sequence[str]
    count: int
    cut: int
    far: int
    mesh: str
    options: dict[str, Any]
    reads: Collection[str] = ()

    @classmethod
    def of(
        cls,
        seed: int,
        kinds: Sequence[str] = MIXERS,
        periods: tuple[int, int] = (10, 13),
        reads: Sequence[str] = (),
    ) -> Drawn:
        """periods: at least and at most. reads: of which up to three are taken."""
        draw = random.Random(seed)
        period = [draw.choice(kinds) for _ in range(draw.randint(1, 6))]
        first = [draw.choice(MIXERS[:2])] * draw.choice([0, 0, 1, 2])
        rest = draw.randint(0, len(period) - 1)
        count = max(4, draw.randint(*periods) * len(period) + rest)
        cut, far = count // 2 + draw.randint(-1, 1), draw.randint(2, 4)
        own = draw.sample(reads, draw.randint(1, 3)) if reads else ()
        return cls(first, period, count, cut, far, *draw.choice(MESHES), own)

    def compiled(self, periods: int = 0) -> tuple[Case, Program]:
        """periods: as many more in each of two stages."""
        more = periods * len(self.period)
        count = self.count + 2 * more
        kinds = [*self.first, *(count * self.period)][:count]
        model = Reading(kinds, self.reads, self.far)
        case = Case(model, {"ids": torch.randint(VOCAB, (16, 12))})
        cuts = (f"layers.{self.cut + more}",) if "pp" in self.mesh else ()
        return case, case.compile(self.mesh, 2, cuts=cuts, **self.options)
