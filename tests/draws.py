"""Random combinations of a model, a mesh, a schedule and every option of `compile`.

`draw(seed)` is the same each time, and legal: what cannot be combined is not drawn.
`python tests/draws.py 137` proves one draw alone, `python tests/draws.py 0 999` many.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import Case
from draw_options import (
    OPTIONS,
    Choices,
    Draw,
    DrawFailed,
    chance_of,
    draw_plan,
    draw_values,
    prove_all,
)
from models import gpt2, llama, mixture, opt, plain_gpt, switch_gpt

__all__ = ["MODELS", "OPTIONS", "Draw", "DrawFailed", "Model", "draw", "main"]

SHARING = 8  # consecutive draws have the same model, which is then traced once

# --- what there is to draw ----------------------------------------------------------

SIZES: Choices = {
    "layers": lambda v: [1, 2, 2, 3],
    "batch": lambda v: [1, 2, 4, 6, 8, 8, 12, 12],
    "seq": lambda v: [8, 9, 16, 17],
}
# Of a batch of one nothing can be left out.
LABELS: Choices = {
    "ignored": lambda v: ["none", "half", "uneven"] if v["batch"] > 1 else ["none"]
}
HEADS: Choices = {"heads": lambda v: [1, 2, 3, 4, 4, 6]}
TEXT: Choices = {
    "vocab": lambda v: [101, 64, 7],
    "tied": lambda v: [True, False],
}
DROPOUT: Choices = {"dropout": lambda v: [0.0, 0.2]}
PADDED: Choices = {"padded": lambda v: [True, False]}
EXPERTS: Choices = {
    "experts": lambda v: [2, 3, 4, 7, 8],
    "top_k": lambda v: [1, 2],
}

MODELS: dict[str, Choices] = {
    "plain_gpt": {
        **SIZES,
        "seq": lambda v: [1, 2, 8, 16, 17],
        **HEADS,
        **LABELS,
        **TEXT,
        **DROPOUT,
    },
    "gpt2": {**SIZES, **HEADS, **LABELS, **TEXT, **DROPOUT, **PADDED},
    "llama": {
        **SIZES,
        **HEADS,
        "kv_heads": lambda v: [n for n in range(1, 7) if v["heads"] % n == 0],
        **LABELS,
        **TEXT,
        **PADDED,
    },
    "opt": {**SIZES, **HEADS, **LABELS, **PADDED},
    "switch_gpt": {**SIZES, **EXPERTS},
    "mixture": {
        "name": lambda v: ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"],
        **SIZES,
        **EXPERTS,
        **LABELS,
        **PADDED,
    },
}


# --- a draw -------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A function of `models` and its arguments; frozen: this share of parameters."""

    kind: str
    sizes: tuple[tuple[str, Any], ...]
    frozen: float

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={value!r}" for name, value in self.sizes)
        return f"{self.kind}({sizes}), {self.frozen:.0%} frozen"

    def build(self, dtype: torch.dtype = torch.float64) -> Case:
        sizes = dict(self.sizes)
        case = (_mixture if self.kind == "mixture" else BUILDERS[self.kind])(**sizes)
        chance = random.Random(str(self))
        for p in list(case.model.parameters())[:-1]:
            p.requires_grad_(chance.random() >= self.frozen)
        return case.double() if dtype is torch.float64 else case

    def with_batch(self, samples: int) -> Model:
        return replace(self, sizes=(*dict(self.sizes, batch=samples).items(),))


BUILDERS: dict[str, Callable[..., Case]] = {
    f.__name__: f for f in (plain_gpt, gpt2, llama, opt, switch_gpt)
}


def _mixture(name: str, layers: int, experts: int, top_k: int, **tokens: Any) -> Case:
    return mixture(
        name,
        tokens,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts=experts,
        num_experts_per_tok=top_k,
    )


def draw(seed: int) -> Draw:
    """The draw of a number."""
    model = draw_model(seed // SHARING)
    mesh, options = draw_plan(model.kind, dict(model.sizes), chance_of(str(seed)))
    return Draw(seed, model, mesh, tuple(options.items()))


def draw_model(seed: int) -> Model:
    chance = chance_of(f"model {seed}")
    kind = list(MODELS)[seed % len(MODELS)]
    sizes = draw_values(MODELS[kind], {}, chance)
    frozen = chance("frozen").choice([0.0, 0.0, 0.3, 0.9])
    return Model(kind, tuple(sizes.items()), frozen)


def main(first: int, last: int) -> int:
    """Prove draws first to last, all of them; the number of those that failed."""
    return prove_all(map(draw, range(first, last + 1)))


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(numbers[0], numbers[-1]) > 0)
