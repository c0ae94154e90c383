"""Choices of experts that a bias balances, as the guide on experts has it: forward
counts the loads, the loop writes the bias."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from processes import run_ranks
from torch import Tensor, nn

import autopar

BATCH, SEQ, WIDTH, VOCAB, EXPERTS, STEPS, RATE = 8, 6, 16, 32, 4, 4, 0.05


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        hidden = torch.einsum("bsd,edf->bsef", x, self.up).relu()
        each = torch.einsum("bsef,efd->bsed", hidden, self.down)
        x = x + (each * (scores * mask)[..., None]).sum(2)
        if self.training:
            with torch.no_grad():
                self.load += mask.sum((0, 1))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch_of(seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=drawn)
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


@torch.no_grad()
def balance(model: Balanced) -> None:
    model.bias += RATE * (model.load.mean() - model.load).sign()
    model.load.zero_()


def plain_model() -> Balanced:
    torch.manual_seed(0)
    return Balanced()


Ran = tuple[list[float], list[float], Tensor]


def on_one_device() -> Ran:
    """Losses of training and of evaluation, and the bias."""
    model, losses, evaluated = plain_model(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch_of(i))
        loss.backward()
        optimizer.step()
        balance(model)
        losses.append(loss.item())
        model.eval()
        evaluated.append(model(**batch_of(STEPS)).item())
        model.train()
    return losses, evaluated, model.bias


def on_ranks(mesh: str, microbatches: int, folder: str) -> Ran:
    """The same loop, cut off in the middle, and gone on with."""
    losses, evaluated = [], []
    for first in (0, STEPS // 2):
        model = plain_model()
        step = autopar.compile(
            model, mesh, microbatches=microbatches, example_inputs=batch_of(0)
        )
        optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
        if first:
            step.load(folder, optimizer)
        for i in range(first, first + STEPS // 2):
            optimizer.zero_grad()
            losses.append(float(step(**batch_of(i))))
            optimizer.step()
            balance(model)
            evaluated.append(float(step.evaluate(**batch_of(STEPS))))
        step.save(folder, optimizer)
    return losses, evaluated, step.state_dict()["bias"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatches"), [("dp=2", 2), ("ep=2", 1), ("pp=2", 2)]
)
def test_a_bias_is_moved_by_the_loads_of_the_global_batch(
    mesh, microbatches, tmp_path
) -> None:
    losses, evaluated, bias = on_one_device()
    assert bias.abs().sum() > 0
    args = mesh, microbatches, str(tmp_path)
    for own, own_evaluated, own_bias in run_ranks(on_ranks, 2, *args, seconds=200):
        assert own == pytest.approx(losses, rel=1e-5)
        assert own_evaluated == pytest.approx(evaluated, rel=1e-5)
        assert torch.equal(own_bias, bias)
