"""Random ways to sort rows by their experts, to work on them, and to put them back, and
mixtures that choose rows otherwise: each beside what it is on one device.

    python tests/draw_sorted_rows.py 0 99        seeds; prints what came of them
"""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
import words_of_sorted_rows as words
from cases import Case
from draw_expert_loops import print_outcomes
from models import VOCAB, token_batch
from torch import Tensor, nn

from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.errors import (
    AutoparError,
    CaptureError,
    LossNotSeparable,
    ShardingConflict,
)

WIDTH, HIDDEN, EXPERTS = 16, 24, 4
SIZES = ((8, 4), (8, 3), (8, 2), (8, 6))  # of batch and seq
MESHES = ("dp=2", "tp=2", "cp=2", "pp=2", "ep=2,tp=2", "dp=2,ep=2", "dp=2,tp=2")
USUAL = 3  # of so many draws one has usual words alone

Work = Callable[[Any, Tensor, Tensor], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Draw:
    """texts: of functions of a layer m, its rows x and their ids, one for each layer.
    stays: whether the order may be seen otherwise than by putting rows back."""

    texts: tuple[str, ...]
    batch: int
    seq: int
    mesh: str
    stays: bool

    @property
    def text(self) -> str:
        plan = f"batch {self.batch}, seq {self.seq}, {self.mesh}"
        return "\n".join([plan, *self.texts])

    def build(self) -> Case:
        torch.manual_seed(0)
        model = Model(*map(_function, self.texts))
        return Case(model, token_batch(self.batch, self.seq)).double()


def _function(text: str) -> Work:
    name = f"drawn_{crc32(text.encode())}.py"
    lines = "\n    ".join(text.splitlines())
    source = f"def work(m, x, ids):\n    {lines}\n"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(source, name, "exec"), names)
    return names["work"]


def draw(seed: int) -> Draw:
    """The way of a number, the same each time."""
    chance = random.Random(seed)
    usual = seed % USUAL == 0
    (batch, seq), k = chance.choice(SIZES), chance.choice((1, 2, 3))
    texts, stays = [], False
    for _ in range(1 if usual else chance.choice((1, 1, 2))):
        lines, is_seen = (_usual if usual else _other)(chance, k)
        text, stays = "\n".join(lines), stays or is_seen
        rows = batch * seq
        known = {"k": k, "b": batch, "s": seq, "r": rows, "n": rows * k}
        for name, number in known.items():
            text = text.replace(f"{{{name}}}", str(number))
        texts.append(text)
    mesh = chance.choice(MESHES)
    return Draw(tuple(texts), batch, seq, mesh, stays)


def _usual(chance: random.Random, k: int) -> tuple[list[str], bool]:
    """What all is put back of, but for what `SEEN` sees; and whether that is there."""
    pick = chance.choice
    by_slots, falls, stays = (chance.random() < share for share in (0.25, 0.1, 0.2))
    lines = [pick(words.ROUTERS)]
    if by_slots:
        lines += ["weight, chosen = weight.T.contiguous(), chosen.T.contiguous()"]
    lines += ["flat, share = chosen.flatten(), weight.flatten()"]
    lines += [words.FALLING if falls else pick(words.SORTS)]
    lines += [f"token = {'order % {r}' if by_slots else pick(words.TOKENS)}"]
    take, product = pick(words.TAKES), pick(words.PRODUCTS)
    lines += [f"y = {take}", f"counts = {pick(words.COUNTS)}"]
    lines += [pick(words.ROW_BY_ROW) for _ in range(chance.randint(0, 1))] + [product]
    lines += [pick(words.ROW_BY_ROW) for _ in range(chance.randint(0, 3))]
    lines += [pick(words.SEEN)] * stays + [pick(words.BACK), "return y, 0.0"]
    return _shaped(lines, by_slots), stays or (falls and "counts." in product)


def _other(chance: random.Random, k: int) -> tuple[list[str], bool]:
    """Any words."""
    if chance.random() < 0.15:
        scores = "scores = m.router(x).softmax(-1)"
        return [scores, chance.choice(words.WHOLE), "return y, 0.0"], True

    def pick(name: str, share: float = 0.5) -> str:
        other = chance.random() < share
        return chance.choice(getattr(words, f"OTHER_{name}" if other else name))

    hashed, apart, by_slots, inverse = (
        chance.random() < share for share in (0.15, 0.15, 0.2, 0.4)
    )
    lines = [chance.choice(words.HASHES) if hashed else pick("ROUTERS")]
    flat = "chosen.T.flatten(), weight.T.flatten()"
    lines += [f"flat, share = {flat if by_slots else flat.replace('.T', '')}"]
    lines += [chance.choice(words.APART) if apart else pick("SORTS")]
    lines += [f"token = {'order % {r}' if by_slots else pick('TOKENS', 0.3)}"]
    lines += [f"y = {pick('TAKES', 0.3)}", f"counts = {pick('COUNTS')}"]
    steps = [pick("ROW_BY_ROW", 0.6) for _ in range(chance.randint(0, 3))]
    if chance.random() < 0.5:
        steps += [f"{chance.choice(words.NUMBERS)}\n{chance.choice(words.USES)}"]
    product = words.PRODUCTS[0] if apart else pick("PRODUCTS")
    steps.insert(chance.randint(0, len(steps)), product)
    if chance.random() < 0.2:
        steps.insert(chance.randint(0, len(steps)), words.PRODUCTS[0])
    lines += steps
    back = f"y = y[{chance.choice(words.INVERSES)}].view{{shape}}.sum({{dim}})"
    lines += [back if inverse else pick("BACK", 0.6)]
    lines += [chance.choice(words.SHARED)] * (chance.random() < 0.3)
    aux = chance.choice(words.AUX) if chance.random() < 0.4 else "0.0"
    return _shaped([*lines, f"return y, {aux}"], by_slots), True


def _shaped(lines: list[str], by_slots: bool) -> list[str]:
    """With what depends on whether all first choices come first."""
    known = {
        "shape": "({k}, {r}, -1)" if by_slots else "({r}, {k}, -1)",
        "square": "({k}, {r})" if by_slots else "({r}, {k})",
        "dim": "0" if by_slots else "1",
        "weight": "share.view({k}, {r})" if by_slots else "share.view({r}, {k})",
        "out": "b" if by_slots else "a",
        "all": "x.repeat({k}, 1)" if by_slots else "x.repeat_interleave({k}, 0)",
    }
    text = "\n".join(lines)
    for name, word in known.items():
        text = text.replace(f"{{{name}}}", word)
    return text.splitlines()


class Layer(nn.Module):
    correction: Tensor
    table: Tensor

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.register_buffer("correction", torch.linspace(0.3, 0, EXPERTS))
        self.register_buffer("table", torch.randint(EXPERTS, (VOCAB, 3)))
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(EXPERTS)
        )

    def product(self, x: Tensor, number: Tensor) -> Tensor:
        h = F.silu(torch.bmm(self.up[number], x[:, :, None]))
        return torch.bmm(self.down[number], h)[:, :, 0]

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Any]:
        y, aux = self.work(self, x.flatten(0, 1), ids.flatten())
        return x + y.view_as(x) / 2, aux


class Model(nn.Module):
    def __init__(self, *works: Work) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(map(Layer, works))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, more = self.embed(input_ids), 0.0
        for layer in self.layers:
            x, aux = layer(x, input_ids)
            more = more + aux
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + more


def outcome(drawn: Draw) -> str:
    """`where they were`, `sorted`, or `refused` and why, of other than usual words; it
    raises where anything is wrong."""
    case = drawn.build()
    try:
        ops = {node.name for node in normalize(case.trace()).graph.nodes}
    except CaptureError as error:
        return _refused(drawn, error)
    is_sorted = bool({"aten.sort", "aten.argsort"} & ops)
    assert drawn.stays or not is_sorted, drawn.text
    told = "sorted" if is_sorted else "where they were"
    try:
        for mesh in ("ep=2", drawn.mesh):
            case.verify(mesh, 1)
    except ShardingConflict as error:
        return _refused(drawn, error)
    try:
        case.verify(drawn.mesh, 2)
    except LossNotSeparable:
        return f"{told}, of a whole batch"
    return told


def _refused(drawn: Draw, error: AutoparError) -> str:
    """Raises an error that is not to be, or does not say where and what to do."""
    if not drawn.stays or not error.fix or not error.source:
        raise error
    return f"refused: {re.sub('%[a-z_0-9]+', '%x', error.message)} [{error.fix}]"


if __name__ == "__main__":
    print_outcomes(draw, outcome)
