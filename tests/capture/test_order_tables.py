"""What is made of the batch alone comes in the order in which it is read."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor, nn

from autopar.options import make_plan
from autopar.passes.capture.trace import trace
from autopar.passes.pipeline import compile_program
from autopar.passes.price.cluster import PLAIN
from autopar.verify import verify


class TwoTables(nn.Module):
    """Rotations by two frequencies, made in the order of `kinds`: that of a set of
    strings, over which Gemma 3 loops, differs between processes."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("near", torch.linspace(1, 2, 8), persistent=False)
        self.register_buffer("far", torch.linspace(0, 1, 8), persistent=False)

    def table(self, kind: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.arange(ids.shape[1])[:, None] * getattr(self, kind)
        angles = angles + 0.1 * ids[..., None]  # else it would be a constant
        return angles.cos(), angles.sin()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        tables = {kind: self.table(kind, ids) for kind in self.kinds}
        x = self.embed(ids)
        for layer, kind in zip(self.layers, ("near", "far", "near"), strict=True):
            cos, sin = tables[kind]
            x = x + layer(x * cos + x.flip(-1) * sin).tanh()
        return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten() % 8)


def test_tables_in_any_order_are_one_program() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 16, (4, 6), generator=generator)
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    texts = []
    for kinds in (("near", "far"), ("far", "near")):
        torch.manual_seed(0)
        model = TwoTables(kinds).double()
        traced = trace(model, batch)
        plan = make_plan("pp=2,tp=2", microbatches=2)
        program = compile_program(traced, plan, PLAIN)
        verify(program, model, batch).check()
        texts.append((str(traced), program.modules))
    assert texts[0] == texts[1]


class OwnTables(nn.Module):
    """Each layer makes a table, and one is made before that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(OwnTable() for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        ids[..., None].cos()
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, ids)
        return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten() % 8)


class OwnTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.line(x) * ids[..., None].cos()


def test_tables_stay_in_their_layers() -> None:
    ids = torch.zeros(4, 6, dtype=torch.long)
    graph = trace(OwnTables(), {"ids": ids, "labels": ids.clone()}).graph
    layers = [layer for layer, _ in groupby(n.location.layer for n in graph.nodes)]
    assert layers == ["", "layers.0", "layers.1", "layers.2", ""]
