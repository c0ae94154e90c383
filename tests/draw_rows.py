"""Random models that ask about rows, choose some and write them back, in the words that
people use.

What is drawn is computed as the model computes it, on batches that choose some rows,
none and all, or is refused with a line and a fix.
`python tests/draw_rows.py 137` proves one draw alone, `python tests/draw_rows.py 0 999`
many, and counts what came out.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from cases import Case
from draw_options import (
    Draw,
    chance_of,
    draw_plan,
    draw_values,
    prove_all,
)
from models import randomize
from torch import Tensor, nn
from words_of_rows import (
    DESIGN,
    EXPERTS,
    GUARDS,
    INDICES,
    LOSSES,
    MASKS,
    MOST_RANKS,
    NEVER,
    OUT,
    PICKS,
    SHARES,
    SHARING,
    USUAL,
    VARIED,
    VOCAB,
    WIDTH,
    WORK,
    WRITES,
)

from autopar.passes.program import Program
from autopar.verify import verify


def body(v: dict[str, Any]) -> str:
    """The source of a drawn forward: x [..., width] -> the same."""
    share = PICKS["mask" if v["pick"] in ("masked", "masked_wide") else v["pick"]]
    share = PICKS["index" if "idx" in share else "mask"].format(
        f"({SHARES[v['share']]})"
    )
    lines = [
        "def add(m, x, ids, labels, weight, chosen):",
        f"    out = {OUT[v['out']]}",
    ]
    indent, inner = "    ", ["mask = " + MASKS[v["mask"]]]
    loop = v["turns"] > 1
    lines.append(f"    for e in range({v['turns']}):" if loop else "    e = 0")
    indent = "        " if loop else "    "
    if v["flat"] and any(
        "idx" in t for t in (GUARDS[v["guard"]], PICKS[v["pick"]], WRITES[v["write"]])
    ):
        inner.append("idx = " + INDICES[v["index"]])
    if guard := GUARDS[v["guard"]]:
        skip = "continue" if loop else "return out"
        inner.append(guard.format(indent=indent, skip=skip))
    work = [
        "y = " + PICKS[v["pick"]].format("x"),
        f"v = ({WORK[v['work']].format(share=share)}).to(out.dtype)",
        *WRITES[v["write"]].split("\n"),
    ]
    lines += [indent + line for line in inner]
    lines += [indent + ("    " if guard else "") + line for line in work]
    return "\n".join([*lines, "    return out"])


class Drawn(nn.Module):
    def __init__(self, design: tuple[tuple[str, Any], ...]) -> None:
        super().__init__()
        v = dict(design)
        self.flat = v["flat"]
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))
            for _ in range(EXPERTS)
        )
        self.mix = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.text = f"{body(v)}\n\ndef loss(logits, labels):\n    kept = {v['kept']}\n"
        self.text += f"    return {LOSSES[v['loss']]}\n"
        name = f"drawn_{crc32(self.text.encode())}.py"
        linecache.cache[name] = (len(self.text), None, self.text.splitlines(True), name)
        names: dict[str, Any] = {"torch": torch, "F": F, "EXPERTS": EXPERTS}
        exec(compile(self.text, name, "exec"), names)
        self.add: Callable[..., Tensor] = names["add"]
        self.loss: Callable[..., Tensor] = names["loss"]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, wide = self.embed(ids), labels
        if self.flat:
            x, ids, labels = x.flatten(0, 1), ids.flatten(), labels.flatten()
        weight, chosen = self.router(x).softmax(-1).topk(2)
        x = x + self.add(self, x, ids, labels, weight, chosen)
        logits = self.head(self.norm(x)).view(-1, VOCAB)
        loss = F.cross_entropy(logits, wide.flatten())
        return loss + self.loss(logits, wide.flatten())


@dataclass(frozen=True)
class DrawnRows:
    design: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        words = ", ".join(f"{name}={word}" for name, word in self.design)
        return f"{words}\n{body(dict(self.design))}\n"

    def build(self, dtype: torch.dtype) -> Case:
        torch.manual_seed(0)
        model = randomize(Drawn(self.design)).to(dtype)
        return Case(model, batches(dict(self.design))[0])

    def with_batch(self, samples: int) -> DrawnRows:
        return replace(self, design=(*{**dict(self.design), "batch": samples}.items(),))


@lru_cache(maxsize=2)
def _batches(batch: int, seq: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    shape = (batch, seq)
    usual = torch.randint(VOCAB, shape)
    labels = torch.randint(VOCAB, shape)
    labels[:, 0] = -100
    last = torch.full(shape, NEVER - 1)
    return [
        {"ids": usual, "labels": labels},
        {"ids": usual - usual % 3, "labels": labels},
        {"ids": (usual - usual % 3 + 1).clamp(max=16), "labels": last},
    ]


def batches(v: dict[str, Any]) -> list[dict[str, Tensor]]:
    return _batches(v["batch"], v["seq"])


@dataclass(frozen=True)
class DrawOfRows(Draw):
    """Proved on several batches."""

    model: DrawnRows

    def check(self, program: Program, case: Case) -> Any:
        drawn = batches(dict(self.model.design))
        return [
            verify(program, case.model, batch, drawn=False).check()
            for batch in drawn
            if _is_finite(case.model, batch)
        ]


def _is_finite(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether the model has a loss of a batch of which it may choose no rows."""
    try:
        with torch.no_grad():
            return bool(model(**batch).isfinite())
    except RuntimeError:
        return False


def draw(seed: int) -> Draw:
    """The draw of a number."""
    chance = chance_of(f"rows {seed // SHARING}")
    design = draw_values(DESIGN, {}, chance)
    varied = chance("varied").sample([*USUAL], VARIED)
    design |= {name: word for name, word in USUAL.items() if name not in varied}
    sizes = {"batch": design["batch"], "seq": design["seq"], "fused": False}
    mesh, options = draw_plan("rows", sizes, chance_of(f"of rows {seed}"), MOST_RANKS)
    model = DrawnRows(tuple(design.items()))
    return DrawOfRows(seed, model, mesh, tuple(options.items()), "draw_rows.py")


def main(first: int, last: int) -> int:
    """Prove draws first to last, all of them; the number of those that failed."""
    return prove_all(map(draw, range(first, last + 1)))


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(numbers[0], numbers[-1]) > 0)
