"""Experts that take no more rows than their capacity, cut by `rows[:most]`."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.options import make_plan
from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError
from autopar.passes.pipeline import compile_program
from autopar.passes.price.cluster import PLAIN
from autopar.passes.traced import Traced
from autopar.verify import verify

ROOM = 3  # rows of an expert, of 24 that choose among 3
FIRST = "rows = torch.nonzero(mask).squeeze(-1)\n"
CUTS = {
    "slice": FIRST + "rows = rows[:ROOM]",
    "above": FIRST + "rows = rows[:ROOM] if rows.numel() > ROOM else rows",
    "if_above": FIRST + "if rows.shape[0] > ROOM:\n    rows = rows[:ROOM]",
    "within": FIRST + "rows = rows if rows.numel() <= ROOM else rows[:ROOM]",
    "at_least": FIRST + "if rows.numel() >= ROOM:\n    rows = rows[:ROOM]",
    "min": FIRST + "rows = rows[:min(rows.shape[0], ROOM)]",
    "pairs": "rows, _ = torch.where(mask[:, None])\nrows = rows[:ROOM]",
    "late": FIRST + "rows = rows[ROOM:]",  # what did not fit
    "between": FIRST + "rows = rows[1:ROOM]",
    "any_left": FIRST + "rows = rows[:ROOM]\nif rows.numel() == 0: continue",
    "arange": "rows = torch.arange(len(x))[mask]\nrows = rows[:ROOM]",
}
REFUSED = {
    "shorter": FIRST + "if rows.numel() > ROOM: rows = rows[:2]",
    "longer": FIRST + "if rows.numel() > ROOM + 2: rows = rows[:ROOM]",
    "scaled": FIRST + "if rows.numel() > ROOM: x = x * 2",
    "two": FIRST + "if rows.numel() > 5 or rows.numel() > 4: rows = rows[:4]",
    "of_others": FIRST + "others = torch.nonzero(~mask).squeeze(-1)\n"
    "if others.numel() > ROOM: rows = rows[:ROOM]",
}


class Experts(nn.Module):
    def __init__(self, cut: str) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        body = "".join(f"        {line}\n" for line in cut.split("\n"))
        text = (
            "def route(x, chosen, weight, experts, y):\n"
            "    for e, expert in enumerate(experts):\n"
            "        mask = chosen == e\n"
            f"{body}"
            "        y.index_add_(0, rows, expert(x[rows]) * weight[rows])\n"
            "    return y\n"
        )
        scope = {"torch": torch, "ROOM": ROOM}
        exec(compile(text, __file__, "exec"), scope)
        self.route = scope["route"]

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weight, chosen = self.gate(flat).softmax(-1).max(-1, keepdim=True)
        args = flat, chosen[:, 0], weight, self.experts, torch.zeros_like(flat)
        return self.route(*args).view_as(x)


class Model(nn.Module):
    def __init__(self, cut: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)
        self.blocks = nn.ModuleList(Experts(cut) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def made(cut: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, 17, (4, 6))
    return Model(cut).double(), {"ids": ids, "labels": ids.roll(-1, 1)}


@cache
def captured(cut: str) -> Traced:
    return trace(*made(cut))


@pytest.mark.matrix(quick=4, daily=17)  # one mesh of each cut at least
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2", "pp=2,cp=2"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_is_the_model_s(cut: str, mesh: str) -> None:
    plan = make_plan(mesh, microbatches=1)
    program = compile_program(captured(CUTS[cut]), plan, PLAIN)
    verify(program, *made(CUTS[cut])).check()


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("cut", REFUSED)
def test_what_a_count_changes_besides_is_refused(cut: str) -> None:
    with pytest.raises(CaptureError, match=r"how many rows .numel\(\) gives") as error:
        trace(*made(REFUSED[cut]))
    assert "rows[:most]" in str(error.value)
