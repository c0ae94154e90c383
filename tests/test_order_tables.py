"""What is made of the batch alone comes in the order in which it is read."""

from __future__ import annotations

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
