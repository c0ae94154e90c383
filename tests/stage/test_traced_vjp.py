"""Derivatives of ops that are many in one, by tracing: as torch's autograd has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 4


class Cell(nn.Module):
    """A recurrent cell over a sequence, [b, s, w] -> [b, s, w]."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for row in x.unbind(1):
            state = self.cell(row, state)
            found.append(state)
        return torch.stack(found, 1)


class Padded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (1, 2), mode="circular") + F.pad(x, (2, 1), mode="reflect")


class Partly(nn.Module):
    """What comes out is in part what goes in, and in part without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        one, other, same = torch.ops.aten.atleast_3d([self.bias, x.detach(), x])
        return one.transpose(1, 2) * other + same


MODULES: dict[str, Callable[[], nn.Module]] = {
    "a cell that sets its gates in place": Cell,
    "products of reflections": lambda: parametrizations.orthogonal(
        nn.Linear(WIDTH, WIDTH), orthogonal_map="householder"
    ),
    "padding by writing into a new tensor": Padded,
    "results that are operands": Partly,
}


class Model(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x)).square().sum()


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("mesh", ["tp=1", "dp=2"])
@pytest.mark.parametrize("name", MODULES)
def test_an_op_that_is_many_in_one_has_its_gradient(name: str, mesh: str) -> None:
    x = torch.randn(4, 3, WIDTH)
    Case(Model(MODULES[name]()), {"x": x}).double().verify(mesh)
