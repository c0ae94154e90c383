"""Hybrids: layers of several kinds in a pattern that a stage begins and ends within.

What of these a rank runs is as long however many there are, is proved with a few of
them, and computes what the model does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import Case
from proofs import prove
from torch import Tensor, nn

from autopar.passes.program import Program
from autopar.passes.proof_record import SMALL
from autopar.proof import prove_program

WIDTH = 24
KINDS = ("plain", "gated", "norm", "deep")
MESHES: Sequence[tuple[str, dict[str, Any]]] = (
    ("dp=2", {"zero": 1}),
    ("dp=2", {"zero": 3}),
    ("dp=2", {"zero": 1, "recompute": "selective"}),
    ("tp=2", {}),
    ("dp=2,tp=2", {"zero": 1}),
    ("dp=2,pp=2", {"zero": 1}),
    ("dp=2,pp=2", {"zero": 2}),
    ("dp=2,pp=2", {"zero": 3}),
    ("dp=2,pp=2", {"schedule": "zb-h1"}),
)


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.gate = nn.Linear(WIDTH, 96) if kind == "gated" else None
        self.norm = nn.LayerNorm(WIDTH) if kind == "norm" else None
        self.inner = nn.Linear(96, 96) if kind == "deep" else None

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.norm is None else self.norm(x)
        y = torch.tanh(self.up(h))
        if self.gate is not None:
            y = y * self.gate(h)
        if self.inner is not None:
            y = torch.relu(self.inner(y))
        return x + self.down(y)


class Hybrid(nn.Module):
    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, WIDTH)
        self.layers = nn.ModuleList(map(Layer, kinds))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@dataclass
class Drawn:
    """kinds: of the first layers, and of those that repeat. cut: where the second stage
    begins."""

    first: Sequence[str]
    period: Sequence[str]
    count: int
    cut: int
    mesh: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, seed: int) -> Drawn:
        draw = random.Random(seed)
        period = [draw.choice(KINDS) for _ in range(draw.randint(2, 6))]
        first = [draw.choice(KINDS[:2])] * draw.choice([0, 0, 1, 2])
        count = draw.randint(10, 13) * len(period) + draw.randint(0, len(period) - 1)
        cut = count // 2 + draw.randint(-1, 1)
        return cls(first, period, count, cut, *draw.choice(MESHES))

    def compiled(self, periods: int = 0) -> tuple[Case, Program]:
        """periods: as many more in each of two stages."""
        more = periods * len(self.period)
        count = self.count + 2 * more
        kinds = [*self.first, *(count * self.period)][:count]
        case = Case(Hybrid(kinds), {"ids": torch.randint(48, (16, 12))})
        cuts = (f"layers.{self.cut + more}",) if "pp" in self.mesh else ()
        return case, case.compile(self.mesh, 2, cuts=cuts, **self.options)


def lines(program: Program) -> list[int]:
    return [len(text.splitlines()) for text in program.modules.values()]


@pytest.mark.matrix(quick=2, daily=10)
@pytest.mark.parametrize("seed", range(40))
def test_a_hybrid_is_proved_with_a_few_of_its_layers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("LITTLE", "MUCH"):  # none is run as it is
        monkeypatch.setattr(prove_program, limit, 0)
    case, program = Drawn.of(seed).compiled()
    proof = prove(case.model, case.batch, program)
    few, every = proof.layers
    assert proof.size == SMALL and few < every


@pytest.mark.matrix(quick=1, daily=4)
@pytest.mark.parametrize("seed", range(12))
def test_the_text_of_a_hybrid_is_as_long_however_many_layers_it_has(seed: int) -> None:
    drawn = Drawn.of(seed)
    (_, low), (_, high) = drawn.compiled(), drawn.compiled(periods=2)
    assert max(lines(high)) <= max(lines(low))
