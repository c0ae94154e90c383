"""Models that go through their layers by a number of their own: it says how many there
are, and with few layers it says how few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Case
from proofs import prove
from torch import Tensor, nn

from autopar.cli import main
from autopar.passes.capture.find_repeats import with_layers
from autopar.passes.errors import CaptureError
from autopar.passes.proof_record import SMALL
from autopar.proof import prove_program

WIDTH, VOCAB, COUNT = 16, 32, 12


@dataclass(frozen=True)
class Config:
    num_hidden_layers: int = COUNT


class Counted(nn.Module):
    """owner: what holds the number of layers. read: that number, of the model."""

    def __init__(self, owner: Any, read: Callable[[Any], int]) -> None:
        super().__init__()
        self.own, self.read = owner, read
        self.n_layer, self.heads = COUNT, COUNT
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))
        self.scales = nn.Parameter(torch.rand(COUNT))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i in range(self.read(self)):
            x = x + self.scales[i] * torch.tanh(self.layers[i](x))
        return (x @ self.embed.weight.T).logsumexp(-1).mean()


WAYS = {
    "attribute": (None, lambda model: model.n_layer),
    "dataclass": (Config(), lambda model: model.own.num_hidden_layers),
    "table": ({"n_layers": COUNT}, lambda model: model.own["n_layers"]),
    "namespace": (SimpleNamespace(depth=COUNT), lambda model: model.own.depth),
}
BY_HALVES = (None, lambda model: 2 * (model.heads // 2))


def case_of(way: tuple[Any, Callable[[Any], int]]) -> Case:
    return Case(Counted(*way), {"ids": torch.randint(VOCAB, (8, 6))})


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_they_are_planned_with_few_layers(way) -> None:
    case = case_of(way)
    of = case.short()
    assert of.layers is not None and (of.layers.kept, of.runs) == (3, COUNT)
    assert case.model.read(case.model) == COUNT == case.model.heads


@pytest.mark.parametrize(
    ("way", "mesh"), [("dataclass", "dp=2"), ("table", "dp=2,pp=2")]
)
def test_they_are_proved_with_few_layers(
    way: str, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are the numbers that a model has for each layer, as nanochat has."""
    for limit in ("LITTLE", "MUCH"):  # none is run as it is
        monkeypatch.setattr(prove_program, limit, 0)
    case = case_of(WAYS[way])
    cuts = ("layers.5",) if "pp" in mesh else ()
    program = case.compile(mesh, 2, cuts=cuts, zero=1)
    proof = prove(case.model, case.batch, program)
    few, every = proof.layers
    assert (proof.size, every) == (SMALL, COUNT) and few < COUNT


class ByDepth(nn.Module):
    """Adds rows of a table, which it looks up by numbers in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 48), nn.Linear(48, 64)
        self.depths = nn.Embedding(40, 48)

    def forward(self, ids: Tensor) -> Tensor:
        of_depths = self.depths(torch.tensor(3)) * self.depths.weight[torch.tensor(38)]
        return self.head(self.embed(ids) + of_depths).logsumexp(-1).mean()


def test_rows_that_are_looked_up_by_numbers_in_the_code_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("LITTLE", "MUCH"):
        monkeypatch.setattr(prove_program, limit, 0)
    case = Case(ByDepth(), {"ids": torch.randint(64, (8, 6))})
    assert prove(case.model, case.batch, case.compile("dp=2", 2)).size == SMALL


def test_a_number_that_counts_something_else_is_left_alone() -> None:
    model = Counted(*BY_HALVES)
    seen: list[tuple[int, int]] = []

    def run() -> None:
        seen.append((model.n_layer, model.heads))
        raise CaptureError("not this")

    assert with_layers(model, "layers", (0, 1, 2), run) is None
    assert seen == [(COUNT, COUNT), (3, COUNT)]
    assert (model.n_layer, len(model.layers)) == (COUNT, COUNT)


def test_one_that_cannot_be_had_with_few_is_planned_whole() -> None:
    of = case_of(BY_HALVES).short()
    assert of.layers is None and of.runs == 1


def test_it_is_told_that_no_pipelines_were_tried(tmp_path, capsys) -> None:
    file = tmp_path / "counted.py"
    file.write_text(
        "import torch\nfrom test_counted_layers import BY_HALVES, VOCAB, Counted\n"
        "def model():\n"
        "    return Counted(*BY_HALVES), {'ids': torch.randint(VOCAB, (8, 6))}\n"
    )
    asked = ["plan", f"{file}:model", "--devices", "4xA100-80GB"]
    assert main([*asked, "--global-batch", "8"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no pipelines were tried" in said
