"""Choices of experts that a bias balances, as the guide on experts has it: forward
returns the loads, the loop writes the bias."""

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

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        hidden = torch.einsum("bsd,edf->bsef", x, self.up).relu()
        each = torch.einsum("bsef,efd->bsed", hidden, self.down)
        x = x + (each * (scores * mask)[..., None]).sum(2)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        load = mask.sum((0, 1)).detach()
        return {"loss": loss, **{f"load.{e}": n for e, n in enumerate(load)}}


def batch_of(seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=drawn)
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def moved(bias: Tensor, loads: Tensor) -> Tensor:
    return bias + RATE * (loads.mean() - loads).sign()


def plain_model() -> Balanced:
    torch.manual_seed(0)
    return Balanced()


def on_one_device() -> tuple[list[float], Tensor]:
    model, losses = plain_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(STEPS):
        optimizer.zero_grad()
        given = model(**batch_of(i))
        given["loss"].backward()
        optimizer.step()
        losses.append(given["loss"].item())
        loads = torch.stack([given[f"load.{e}"] for e in range(EXPERTS)])
        model.bias = moved(model.bias, loads)
    return losses, model.bias


def on_ranks(mesh: str, microbatches: int) -> tuple[list[float], Tensor]:
    step = autopar.compile(
        plain_model(), mesh, microbatches=microbatches, example_inputs=batch_of(0)
    )
    optimizer, losses = torch.optim.AdamW(step.parameters(), lr=1e-2), []
    for i in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(step(**batch_of(i))))
        optimizer.step()
        loads = torch.stack([step.metrics[f"load.{e}"] for e in range(EXPERTS)])
        bias = moved(step.state_dict()["bias"], loads)
        step.load_state_dict({"bias": bias}, strict=False)
    return losses, step.state_dict()["bias"]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=2", 2), ("ep=2", 1)])
def test_a_bias_is_moved_by_the_loads_of_the_global_batch(mesh, microbatches) -> None:
    losses, bias = on_one_device()
    assert bias.abs().sum() > 0
    for own, moved_bias in run_ranks(on_ranks, 2, mesh, microbatches, seconds=200):
        assert own == pytest.approx(losses, rel=1e-5)
        assert torch.equal(moved_bias, bias)
