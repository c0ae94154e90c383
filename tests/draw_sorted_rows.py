"""Random ways to sort rows by their experts, to work on them, and to put them back:
each beside what it is on one device.

    python tests/draw_sorted_rows.py 0 99        seeds; prints what came of them
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case
from draw_expert_loops import print_outcomes
from models import VOCAB, token_batch
from torch import Tensor, nn

from autopar.passes.capture.normalize import normalize

ROWS, WIDTH, HIDDEN, EXPERTS = 32, 16, 24, 4

SORTS = (
    "order = flat.argsort(stable=True); number = flat[order]",
    "number, order = flat.sort(stable=True)",
    "number, order = torch.sort(flat, 0)",
    "order = torch.sort(flat.int())[1]; number = flat.index_select(0, order)",
)
FALLING = "order = flat.argsort(descending=True); number = flat.gather(0, order)"
TOKENS = (
    "order // {k}",
    "order.div({k}, rounding_mode='floor')",
    "torch.arange(32).repeat_interleave({k})[order]",
    "(torch.arange(32 * {k}) // {k})[order]",
)
TAKES = (
    "x[token]",
    "x.index_select(0, token)",
    "x.gather(0, token[:, None].expand(-1, 16))",
    "F.embedding(token, x)",
    "{all}[order]",
)
COUNTS = (
    "torch.bincount(flat, minlength=4)",
    "flat.bincount(minlength=4)",
    "F.one_hot(flat, 4).sum(0)",
    "F.one_hot(chosen, 4).sum(dim=(0, 1))",
    "torch.histc(flat.double(), 4, 0, 3).long()",
    "(flat[:, None] == torch.arange(4)).sum(0)",
)
PRODUCTS = (
    "y = m.product(y, number)",
    "p = y.split(counts.tolist())\n"
    "y = torch.cat([m.experts[e](p[e]) for e in range(4)])",
    "n = counts.tolist()\np, s = y.split(n), share[order].split(n)\n"
    "y = torch.cat([f(p[e]) * s[e][:, None] for e, f in enumerate(m.experts)])",
    "e = torch.searchsorted(counts.cumsum(0), torch.arange(len(y)), right=True)\n"
    "y = m.product(y, e)",
)
ROW_BY_ROW = (
    "y = F.silu(y)",
    "y = y * share[order, None]",
    "y = y * (1 + share[order]).unsqueeze(-1)",
    "y = m.norm(y)",
    "y = m.linear(y)",
    "y = y + m.bias[number]",
    "y = y.view(-1, 2, 8).softmax(-1).flatten(1)",
    "y = y * (number[:, None] + 1) / 4",
    "y = torch.cat([y[:, 8:], y[:, :8]], 1)",
    "y = torch.where((number > 1)[:, None], y, 2 * y)",
    "y = y + 0.1 * y.sum(0)",
    "y = y / (1 + y.abs().mean())",
    "y = y.masked_fill((share[order] < 0.3)[:, None], 0)",
    "y = y + x[token]",
)
SEEN = (
    "y = y + y.cumsum(0) / 50",
    "y = y + y.flip(0)",
    "y = y * torch.arange(len(y))[:, None] / 50",
    "y = y + x[:1].expand(len(y), -1)",
    "y = y[order]",
    "y = y + share[:, None]",
    "y = y * share.sort(0)[0][:, None]",
    "y = torch.cat([y[1:], y[:1]])",
)
BACK = (
    "y = y[order.argsort()].view{shape}.sum({dim})",
    "z = torch.empty_like(y); z[order] = y; y = z.view{shape}.sum({dim})",
    "i = torch.empty_like(order); i[order] = torch.arange(len(order))\n"
    "y = y[i].view{shape}.sum({dim})",
    "y = torch.zeros_like(x).index_add(0, token, y)",
    "y = torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, 16), y)",
)


@dataclass(frozen=True)
class Draw:
    """text: of a function of a layer m and its rows x. stays: whether the order is seen
    otherwise than by putting rows back."""

    text: str
    stays: bool

    def build(self) -> Case:
        name = f"<{hash(self.text)}>"
        lines = "\n    ".join(self.text.splitlines())
        source = f"def work(m, x):\n    {lines}\n"
        linecache.cache[name] = len(source), None, source.splitlines(True), name
        names: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(source, name, "exec"), names)
        torch.manual_seed(0)
        return Case(Model(names["work"]), token_batch(4, ROWS // 4)).double()


def draw(seed: int) -> Draw:
    """The way of a number, the same each time."""
    chance = random.Random(seed)
    k, pick = chance.choice((1, 2, 3)), chance.choice
    by_slots, falls, stays = (chance.random() < share for share in (0.25, 0.1, 0.2))
    lines = [f"weight, chosen = m.router(x).softmax(-1).topk({k}, dim=-1)"]
    if by_slots:
        lines += ["weight, chosen = weight.T.contiguous(), chosen.T.contiguous()"]
    lines += ["flat, share = chosen.flatten(), weight.flatten()"]
    lines += [FALLING if falls else pick(SORTS)]
    lines += [f"token = {'order % 32' if by_slots else pick(TOKENS)}"]
    every = f"x.repeat({k}, 1)" if by_slots else f"x.repeat_interleave({k}, 0)"
    lines += [f"y = {pick(TAKES).replace('{all}', every)}", f"counts = {pick(COUNTS)}"]
    product = pick(PRODUCTS)
    lines += [pick(ROW_BY_ROW) for _ in range(chance.randint(0, 1))] + [product]
    lines += [pick(ROW_BY_ROW) for _ in range(chance.randint(0, 3))]
    lines += [pick(SEEN)] * stays
    shape, dim = (f"({k}, 32, -1)", 0) if by_slots else (f"(32, {k}, -1)", 1)
    lines += [pick(BACK).format(shape=shape, dim=dim), "return y"]
    text = "\n".join(lines).replace("{k}", str(k))
    return Draw(text, stays or (falls and "counts." in product))


class Layer(nn.Module):
    def __init__(self, work: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.work = work
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(EXPERTS)
        )

    def product(self, x: Tensor, number: Tensor) -> Tensor:
        h = F.silu(torch.bmm(self.up[number], x[:, :, None]))
        return torch.bmm(self.down[number], h)[:, :, 0]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.work(self, x.flatten(0, 1)).view_as(x) / 2


class Model(nn.Module):
    def __init__(self, work: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer(work)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def outcome(drawn: Draw) -> str:
    """`where they were` or `sorted`; it raises where anything is wrong."""
    case = drawn.build()
    ops = {node.name for node in normalize(case.trace()).graph.nodes}
    is_sorted = bool({"aten.sort", "aten.argsort"} & ops)
    assert drawn.stays or not is_sorted, drawn.text
    for mesh in ("dp=2", "ep=2"):
        case.verify(mesh, 1)
    return "sorted" if is_sorted else "where they were"


if __name__ == "__main__":
    print_outcomes(draw, outcome)
