"""Random small GPTs, each as people write them, on random meshes with random options.

Where `draws` varies options over a few models, this varies the model: what each part
is, how it is spelled, and sizes that coincide or divide nothing. What is drawn must be
computed as the model computes it, or be refused with a line and a fix.
`python tests/draw_models.py 137` proves one draw alone, `python tests/draw_models.py 0
999` many, and counts what came out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
from draw_options import (
    Choices,
    Draw,
    Values,
    chance_of,
    divisors,
    draw_plan,
    draw_values,
    prove_all,
)
from drawn_design import Design
from drawn_gpt import NOISES, Built, build
from drawn_layers import NORMS
from drawn_losses import LOOKUPS, LOSSES, PAIRS
from drawn_mixers import MIXERS

MOST_RANKS = 6
SHARING = 4  # consecutive draws have the same model, which is then traced once

RESIDUALS = ["scaled", "gated", "deep", "streams", "skips", "first"]
MLPS = (
    "gelu",
    "tanh",
    "relu2",
    "silu",
    "swiglu",
    "geglu",
    "chunk",
    "halves",
    "turns",
    "maxout",
    "experts",
    "top_experts",
)
ROTARY = ("halves", "interleaved", "partial", "complex")
PLACES = ("pre", "pre", "post", "parallel", "sandwich")
MIXED = ["attention"] * (2 * len(MIXERS)) + list(MIXERS)


def attends(v: Values) -> bool:
    return v["mixer"] == "attention" or v["hybrid"]


def only(*values: object, where: bool, otherwise: object) -> list[object]:
    return list(values) if where else [otherwise]


# What a design may be, in the order in which it is drawn: sizes after what needs them.
DESIGN: Choices = {
    "mixer": lambda v: MIXED,
    "hybrid": lambda v: only(True, False, where=v["mixer"] != "attention", otherwise=0),
    "layers": lambda v: [2] if v["hybrid"] else [1, 1, 1, 2],
    "heads": lambda v: [1, 2, 3, 4, 4, 5, 6],
    "kv_heads": lambda v: (
        divisors(v["heads"]) if v["mixer"] == "attention" else [v["heads"]]
    ),
    "head_dim": lambda v: [4, 6, 8],
    # As wide as its heads, mostly; or not; or so that sizes coincide.
    "width": lambda v: [*[v["heads"] * v["head_dim"]] * 3, 10, 16, 18, 24],
    "ffn": lambda v: [v["width"], 2 * v["width"], 3 * v["width"], 20, 21, 22],
    "batch": lambda v: [1, 2, 3, 4, 4, 5, 6, 6, 8],
    "seq": lambda v: only(
        5, 6, 7, 8, 9, v["head_dim"], max(3, v["heads"]), v["width"],
        where=v["mixer"] not in ("gru", "scan"), otherwise=5,
    ),
    "vocab": lambda v: [7, 13, 16, 30, v["width"], v["seq"], v["ffn"]],
    "place": lambda v: list(PLACES),
    "norm": lambda v: list(NORMS),
    "positions": lambda v: only(
        "none", "learned", "alibi", "relative", *ROTARY,
        where=attends(v), otherwise="learned",
    ),
    "tables": lambda v: ["made", "buffer"],
    "qkv": lambda v: only(
        "separate", "separate", "split", "groups", "einsum",
        *(["chunk"] if v["heads"] == v["kv_heads"] else ["split"]),
        where=attends(v), otherwise="separate",
    ),
    "qk_norm": lambda v: only(
        "none", "none", "head", "whole", where=attends(v), otherwise="none"
    ),
    "attention": lambda v: only(
        "sdpa", "sdpa", "matmul", "einsum", "baddbmm",
        where=attends(v), otherwise="sdpa",
    ),
    "repeat": lambda v: ["interleave", "expand", "kernel"],
    "window": lambda v: [0, 0, 3] if attends(v) else [0],
    "softcap": lambda v: [0.0, 0.0, 0.0, 5.0] if attends(v) else [0.0],
    "sinks": lambda v: [False] * 4 + [True] if attends(v) else [False],
    "mlp": lambda v: list(MLPS),
    "biases": lambda v: ["all", "", "qkv", "mlp head", "out"],
    "tied": lambda v: [True, False],
    "embed_scale": lambda v: [False, False, True],
    "residual": lambda v: ["plain"] * 4 + RESIDUALS,
    "memory": lambda v: [0, 0, 0, 0, 2],
    "shared": lambda v: only(
        False, False, False, True,
        where=v["layers"] > 1 and not v["hybrid"], otherwise=False,
    ),
    "head": lambda v: ["linear", "matmul", "einsum"],
    "logits_softcap": lambda v: [False, False, False, True],
    "dropout": lambda v: [0.0, 0.0, 0.0, 0.2],
    "padded": lambda v: only(False, False, True, where=attends(v), otherwise=False),
    "ignored": lambda v: ["none", "half", "uneven"] if v["batch"] > 1 else ["none"],
    "loss": lambda v: [
        *["cross_entropy", "shifted"] * 3,
        *(loss for loss in LOSSES if loss not in PAIRS or v["batch"] % 2 == 0),
    ],
    "padding": lambda v: [0, 0, 0, 3, -v["vocab"] % 8],
    # Logits as far down as can be are for a lookup alone.
    "cropped": lambda v: only(
        "slice", "mask", where=v["loss"] in LOOKUPS, otherwise="slice"
    ),
    "returns": lambda v: ["loss", "pair", "dict", "logits"],
    "noise": lambda v: [*["none"] * 2 * len(NOISES), *NOISES],
}  # fmt: skip


@dataclass(frozen=True)
class DrawnModel:
    """frozen: this share of parameters is not trained."""

    design: Design
    frozen: float

    def __str__(self) -> str:
        return f"{self.design}, {self.frozen:.0%} frozen"

    def build(self, dtype: torch.dtype) -> Built:
        built = build(self.design, dtype)
        chance = chance_of(str(self))("frozen")
        for p in list(built.model.parameters())[:-1]:
            p.requires_grad_(chance.random() >= self.frozen)
        return built

    def with_batch(self, samples: int) -> DrawnModel:
        return replace(self, design=replace(self.design, batch=samples))


def draw(seed: int) -> Draw:
    """The draw of a number."""
    model = draw_model(seed // SHARING)
    design = model.design
    sizes = {**vars(design), "fused": design.has_fused_attention}
    mesh, options = draw_plan("drawn", sizes, chance_of(f"drawn {seed}"), MOST_RANKS)
    return Draw(seed, model, mesh, tuple(options.items()), "draw_models.py")


def draw_model(seed: int) -> DrawnModel:
    chance = chance_of(f"design {seed}")
    design = Design(**draw_values(DESIGN, {}, chance))
    return DrawnModel(design, chance("frozen").choice([0.0, 0.0, 0.0, 0.3, 0.9]))


def main(first: int, last: int) -> int:
    """Prove draws first to last, all of them; the number of those that failed."""
    return prove_all(map(draw, range(first, last + 1)))


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(numbers[0], numbers[-1]) > 0)
