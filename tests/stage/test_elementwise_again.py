"""What elementwise ops make again is not kept, changes no bit, and is a minimum cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import pytest
import torch
from cases import Case, run_all_ranks
from models import gpt2, llama, plain_gpt, token_batch
from torch import Tensor, nn

from autopar.passes.recompute.elementwise_again import SINK, SOURCE, _minimum_cut

WIDTH = 16
POINTWISE: list[Callable[[Tensor], Tensor]] = [
    torch.sigmoid,
    torch.tanh,
    torch.nn.functional.silu,
    lambda x: x * x,
    lambda x: (x.double() * 1.5).float(),
    torch.exp,
]


class Gated(nn.Module):
    """A layer as those of Llama: a norm in float32, then a gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in "ab")
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = self.scale * unit.to(x.dtype)
        gated = torch.nn.functional.silu(self.gate(y)) * self.up(y)
        return x + self.down(gated)


class Drawn(nn.Module):
    """A layer of elementwise ops of earlier values, by chance, between products."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH) for _ in "ab")
        draw = torch.Generator().manual_seed(seed)

        def number(below: int) -> int:
            return int(torch.randint(below, (), generator=draw))

        self.steps = [
            (number(len(POINTWISE)), number(i + 1), number(i + 1)) for i in range(8)
        ]
        self.told = str(self.steps)  # apart from others, see `cases.fingerprint`

    def forward(self, x: Tensor) -> Tensor:
        values = [self.first(x)]
        for op, a, b in self.steps:
            values.append(POINTWISE[op](0.3 * values[a]) + 0.1 * values[b])
        return x + self.last(sum(values[-3:]))


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 32, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def next_word_loss(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch["labels"].flatten()
    )


def layered(*layers: nn.Module) -> Case:
    return Case(Layers(*layers), token_batch(8, 8, 32), next_word_loss)


def drawn(seed: int) -> Case:
    return layered(*(Drawn(10 * seed + i) for i in range(3)))


def residuals(case: Case, policy: str, **options: object) -> int:
    program = case.compile("", recompute=policy, **options)
    return sum(stage.footprint.residuals for stage in program.stages)


def test_a_gated_layer_keeps_what_products_read() -> None:
    """In 16 bits: x, its norm, the gate, what it gates, and their product; but neither
    x in float32, nor the norm before its weight, nor the gate's silu."""
    case, tokens = layered(*(Gated() for _ in range(4))), 8 * 8
    half = {"precision": "bf16-stream"}
    saved = residuals(case, "none", **half) - residuals(case, "elementwise", **half)
    each = WIDTH * (4 + 2 - 2) + 2 * WIDTH * 2
    assert saved == 4 * tokens * each


@pytest.mark.matrix(quick=3, daily=10)
@pytest.mark.parametrize("mesh", ["", "tp=2", "pp=2", "dp=2"])
@pytest.mark.parametrize("build", [plain_gpt, gpt2, llama, lambda: drawn(0)])
def test_no_bit_changes(build: Callable[[], Case], mesh: str) -> None:
    case = build().double()
    runs = []
    for policy in "none", "elementwise":
        program = case.compile(mesh, 2, recompute=policy)
        runs.append(run_all_ranks(program, case.model, case.batch, seed=1))
    (loss, grads), (loss_again, grads_again) = runs
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(grads[n], grads_again[n]) for n in grads)


@pytest.mark.matrix(quick=2, daily=6)
@pytest.mark.parametrize("seed", range(12))
def test_what_is_drawn_is_right_and_keeps_no_more(seed: int) -> None:
    case = drawn(seed)
    case.verify("pp=3" if seed % 2 else "tp=2", 2, recompute="elementwise")
    kept = residuals(case, "none")
    assert residuals(case, "full") <= residuals(case, "elementwise") <= kept


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_is_the_least_of_all(seed: int) -> None:
    """Of drawn values, each made of earlier ones or coming from outside."""
    draw = random.Random(seed)
    widths = tuple(draw.randint(1, 5) for _ in range(6))
    open_to: set[tuple[int, int]] = {(SOURCE, 0), (11, SINK)}
    for i in range(1, 6):
        sources = draw.sample(range(i), draw.randint(0, min(i, 2)))
        open_to |= {(2 * s + 1, 2 * i) for s in sources} or {(SOURCE, 2 * i)}
        open_to |= {(2 * i + 1, SINK)} if draw.random() < 0.3 else set()
    comes = {b // 2 for a, b in open_to if a == SOURCE}
    made_of = {i: [a // 2 for a, b in open_to if b == 2 * i] for i in range(6)}

    def makes_all(kept: frozenset[int]) -> bool:
        """Whether what is read can be made of what is kept."""

        def made(i: int) -> bool:
            return i in kept or (i not in comes and all(map(made, made_of[i])))

        return all(made(a // 2) for a, b in open_to if b == SINK)

    beyond = _minimum_cut(widths, tuple(sorted(open_to)))
    kept = frozenset(i for i in range(6) if 2 * i not in beyond and 2 * i + 1 in beyond)
    every = (frozenset(x) for n in range(7) for x in combinations(range(6), n))
    least = min(sum(widths[i] for i in x) for x in every if makes_all(x))
    assert makes_all(kept) and sum(widths[i] for i in kept) == least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("pp=2", {"schedule": "zb-h1"}),
        ("dp=2", {"zero": 3}),
        ("tp=2", {"precision": "bf16"}),
        ("pp=2,tp=2", {"schedule": "interleaved", "stages_per_rank": 2}),
        ("cp=2", {}),
    ],
)
def test_it_goes_with_what_else_a_plan_has(mesh: str, options: dict) -> None:
    for policy in "elementwise", "selective":
        llama().verify(mesh, 2, recompute=policy, **options)


def test_selective_leaves_out_what_ranks_gather_too() -> None:
    case = layered(*(Gated() for _ in range(4)))
    for mesh, apart in ("", False), ("tp=2", True):
        kept = {
            policy: case.compile(mesh, recompute=policy).stages[0].footprint.residuals
            for policy in ("none", "elementwise", "selective", "full")
        }
        assert sorted(kept, key=kept.__getitem__, reverse=True) == list(kept), mesh
        assert (kept["selective"] < kept["elementwise"]) == apart, mesh
