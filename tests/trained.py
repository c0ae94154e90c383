"""Training in two halves with a checkpoint between, for tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from cases import Case
from models import plain_gpt
from processes import run_ranks
from torch import Tensor, nn

import autopar
from autopar.passes.program import Program

HALF, STEPS = 3, 6
Trained = tuple[list[float], dict[str, Tensor]]


def build(
    dtype: torch.dtype = torch.float64, make: Any = plain_gpt, **options: Any
) -> Case:
    """With a parameter that is not trained; plain_gpt has tied embeddings."""
    case = make(layers=2, **options)
    case.model.positions.weight.requires_grad_(False)
    return Case(case.model.to(dtype), case.batch)


def optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """As people write it: weights decay, biases and norms do not."""
    trained = [p for _, p in named if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.3},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


def rates(update: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(update, T_max=2 * STEPS)


def batch_of(case: Case, i: int) -> dict[str, Tensor]:
    return {k: v.roll(i, 0) for k, v in case.batch.items()}


def train(
    folder: Path | None,
    program: Program,
    first: int,
    last: int,
    model: Mapping[str, Any] = MappingProxyType({}),
) -> Trained:
    """Steps first..last on this rank; loads before them, unless first is 0, and saves
    after them. Returns losses and the final weights."""
    case = build(**model)
    step = autopar.compile(
        case.model, program.mesh, program=program, example_inputs=case.batch
    )
    update = optimizer(step.named_parameters())
    schedule = rates(update)
    if first:
        assert folder is not None
        schedule.load_state_dict(step.load(folder, update))
        assert step.executor.steps == first
    losses = []
    for i in range(first, last):
        update.zero_grad()
        losses.append(step(**batch_of(case, i)).item())
        step.clip_grad_norm_(1.0)
        update.step()
        schedule.step()
    if folder is not None and last < STEPS:
        step.save(folder, update, extra=schedule.state_dict())
    return losses, step.state_dict()


def go_on(model: nn.Module, case: Case, update: Any, schedule: Any, first: int) -> list:
    """The same steps on one device, up to the last."""
    losses = []
    for i in range(first, STEPS):
        update.zero_grad()
        loss = model(**batch_of(case, i))[1]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def train_plainly(**model: Any) -> Trained:
    case = build(**model)
    update = optimizer(case.model.named_parameters())
    losses = go_on(case.model, case, update, rates(update), 0)
    return losses, case.model.state_dict()


def compiled(mesh: str, model: Any = MappingProxyType({}), **options: Any) -> Program:
    """With its proof, so that no rank looks for one."""
    return build(**model).proved(mesh, **options)


def run(folder: Path | None, program: Program, *arguments: Any) -> list[Trained]:
    return run_ranks(train, program.mesh.size, folder, program, *arguments)
