"""What is emitted, byte for byte: `--update-golden` writes the golden anew, whose
change is then reviewed as code."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn


class Mlp(nn.Module):
    """Rows x [batch, 4], each against a number of y [batch]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.gelu(self.up(x))
        return F.mse_loss(self.down(x)[:, 0], y)


def test_the_module_of_a_rank(golden: Callable[[str, str], None]) -> None:
    """Forward, backward and what is around them, of a rank that has half of a layer."""
    case = Case(Mlp(), {"x": torch.zeros(2, 4), "y": torch.zeros(2)})
    program = case.compile("tp=2", split={"tp": ("ffn",)})
    (text,) = program.modules.values()
    golden("mlp-tp", text)
