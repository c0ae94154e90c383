"""Random loops over experts that are modules, in the words that people use.

What is drawn computes what the model does, or is refused with a line and a fix; and
loops of usual words are one step for all experts. `python tests/draw_expert_loops.py 0
199` draws many, and counts what came out.
"""

from __future__ import annotations

import linecache
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case
from models import randomize
from torch import Tensor, nn
from words_of_expert_loops import (
    GUARDS,
    LOOPS,
    MASKS,
    ONE,
    OTHERS,
    PICKS,
    PICKS_OF_ONE,
    PICKS_OF_SAMPLES,
    SEVERAL,
    STARTS,
    WORK,
    WRITES,
    WRITES_OF_ROWS,
)

from autopar.passes.errors import CaptureError

VOCAB, WIDTH, INNER = 31, 8, 12
BATCH, SEQ = 4, 6
MESHES = ("ep=2", "tp=2", "dp=2", "dp=2,ep=2", "ep=2,tp=2", "pp=2", "cp=2")
# Rows by places of one dim.
PLACES = {"where", "tuple", "columns", "unbind", "turned", "sum", "slot"}
PLACES |= {"column", "view", "scores"}
USUAL = 2  # of so many draws all but one have usual words alone


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, INNER, bias=False)
        self.w3 = nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, dim=-1)
        return self.down(F.gelu(a) * b)


class Halves(Chunked):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h[..., :INNER].sigmoid() * h[:, INNER:])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.down(F.gelu(self.up(self.weight * h.type_as(x))))


class Matrices(nn.Module):
    """Weights [in, out] of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(WIDTH, INNER) * 0.1)
        self.b1 = nn.Parameter(torch.zeros(INNER))
        self.w2 = nn.Parameter(torch.randn(INNER, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x @ self.w1 + self.b1) @ self.w2


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 2.0


class Einsum(Matrices):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("nd,df->nf", x, self.w1).relu()
        return torch.einsum("nf,fd->nd", h, self.w2) + self.b1.sum()


class Headed(nn.Module):
    """Rows as heads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH // 2, INNER), nn.Linear(2 * INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x.view(-1, 2, WIDTH // 2)).tanh().flatten(1))


class Scaled(Chunked):
    """With products of parameters of its own, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.gain * self.scale)


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.GELU(), nn.Dropout(0.0)
    ).append(nn.Linear(INNER, WIDTH))


Expert = Callable[[], nn.Module]
EXPERTS: dict[str, Expert] = {
    "gated": Gated,
    "chunked": Chunked,
    "halves": Halves,
    "normed": Normed,
    "matrices": Matrices,
    "lora": Lora,
    "sequential": sequential,
}
OTHER_EXPERTS: dict[str, Expert] = {
    "einsum": Einsum,
    "headed": Headed,
    "scaled": Scaled,
}


@dataclass(frozen=True)
class Loop:
    """text: of a function of a layer and its input. usual: whether it has usual words
    alone."""

    words: Mapping[str, Any]
    text: str
    mesh: str
    usual: bool

    def build(self) -> Case:
        torch.manual_seed(0)
        batch = {name: torch.randint(VOCAB, (BATCH, SEQ)) for name in ("ids", "labels")}
        return Case(randomize(Model(self)), batch).double()


def draw(seed: int) -> Loop:
    chance = random.Random(f"expert loops {seed}")
    usual = seed % USUAL != 0
    count = chance.choice([2, 3, 4, 4, 4, 6, 8])
    one, samples = chance.random() < 0.25, chance.random() < 0.25
    k = min(chance.choice([1, 2, 2, 2, 3, count]), count)
    routers = dict(ONE if one else SEVERAL)
    if not one and (count % 2 or k > count // 2):
        del routers["groups"]
    picks = PICKS_OF_ONE if one else PICKS_OF_SAMPLES if samples else PICKS
    samples = samples and not one
    tables: dict[str, dict[str, Any]] = {
        "router": routers,
        "mask": MASKS,
        "pick": dict(picks),
        "start": STARTS,
        "guard": GUARDS,
        "work": WORK,
        "loop": LOOPS,
        "expert": {name: name for name in EXPERTS},
    }
    if not usual:
        for name, words in OTHERS.items():
            if not (one or samples):
                tables[name] = {**tables[name], **words}
        tables["expert"] |= {name: name for name in OTHER_EXPERTS}
    words = {name: chance.choice([*table]) for name, table in tables.items()}
    rows, at, share = tables["pick"][words["pick"]]
    by_place = not samples and words["pick"] in PLACES
    writes = {**WRITES, **(WRITES_OF_ROWS if by_place else {})}
    words["write"] = chance.choice([*writes])
    before, mask = MASKS[words["mask"]]
    lines = ["E = len(m.experts)"]
    lines += [] if samples else ["before = x.shape", "x = x.flatten(0, 1)"]
    lines += _lines(routers[words["router"]])
    lines += [*_lines(before), *_lines(STARTS[words["start"]])]
    lines += _lines(tables["loop"][words["loop"]])
    work = WORK[words["work"]].format(x=f"x[{at}]", share=share)
    write = writes[words["write"]].format(at=at)
    for part in (mask, tables["guard"][words["guard"]], rows, work, write):
        lines += [f"    {line}" for line in _lines(part)]
    lines.append("return y" if samples else "return y.view(before)")
    text = "\n    ".join(["def add(m, x):", *lines]).replace("{k}", str(k)) + "\n"
    words |= {"experts": count, "k": k, "seed": seed}
    return Loop(words, text, chance.choice(MESHES), usual)


def _lines(text: str) -> list[str]:
    return [line for line in text.strip("\n").split("\n") if line]


class Layer(nn.Module):
    def __init__(self, loop: Loop, add: Callable[..., Tensor]) -> None:
        super().__init__()
        count = loop.words["experts"]
        make = {**EXPERTS, **OTHER_EXPERTS}[loop.words["expert"]]
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.register_buffer("bias", torch.linspace(0.3, 0, count))
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(make() for _ in range(count))
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        return x + self.add(self, x)


class Model(nn.Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        name = f"drawn_loop_{loop.words['seed']}.py"
        lines = loop.text.splitlines(True)
        linecache.cache[name] = len(loop.text), None, lines, name
        names: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(loop.text, name, "exec"), names)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer(loop, names["add"]) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten())


def outcome(loop: Loop) -> str:
    """`one step`, `as it is` or `refused`; it raises where anything is wrong."""
    case = loop.build()
    try:
        joined = case.trace().joined
    except CaptureError as error:
        assert error.fix and not loop.usual, f"{loop.text}{error}"
        return "refused"
    assert joined or not loop.usual, loop.text
    for mesh in dict.fromkeys(("ep=2", loop.mesh)):
        case.verify(mesh, 1)
    return "one step" if joined else "as it is"


def print_outcomes(draw: Callable[[int], Any], outcome: Callable[[Any], str]) -> None:
    """Prints what came of the seeds that the command line names, the first and the
    last; of what was wrong, the error and the text that was drawn."""
    first, last = map(int, sys.argv[1:])
    counts: Counter[str] = Counter()
    for seed in range(first, last + 1):
        drawn = draw(seed)
        try:
            counts[outcome(drawn)] += 1
        except Exception as error:
            counts["wrong"] += 1
            text = f"{error}"[:1500]
            print(seed, type(error).__name__, text, drawn.text, flush=True)
    print(dict(counts))


if __name__ == "__main__":
    print_outcomes(draw, outcome)
