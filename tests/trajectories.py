"""Training on ranks beside training of the plain model on one device, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from cases import Case
from losses_of_rows import of_all
from models import gpt2, llama, plain_gpt, switch_gpt
from models_of_rows import case as experts
from models_of_rows import in_place
from processes import run_ranks
from torch import Tensor

import autopar

MODELS: dict[str, Callable[..., Case]] = {
    "plain": plain_gpt,
    "gpt2": gpt2,
    "llama": llama,
    "switch": switch_gpt,
    "loops": lambda layers: experts(of_all, *[in_place] * layers),
}
Trajectory = tuple[list[float], list[float], dict[str, Tensor]]
STEPS, MOST = 4, 0.5  # the gradients' norm is above it, so clipping counts


def build(model: str, dtype: torch.dtype = torch.float64) -> Case:
    padded = {"padded": True} if model in ("gpt2", "llama") else {}
    case = MODELS[model](layers=2, **padded)
    return case.double() if dtype == torch.float64 else case


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def batches(case: Case) -> list[dict[str, Tensor]]:
    """Another batch at each step: the samples in turn."""
    return [{k: v.roll(i, 0) for k, v in case.batch.items()} for i in range(STEPS)]


def train_plainly(model: str, dtype: torch.dtype = torch.float64) -> Trajectory:
    """Losses, gradient norms and final weights of the model on one device."""
    case = build(model, dtype)
    parameters = list(case.model.parameters())
    update, losses, norms = optimizer(parameters), [], []
    for batch in batches(case):
        out = case.model(**batch)
        returned = out if isinstance(out, Tensor) else out[1]
        loss = returned if case.loss_fn is None else case.loss_fn(out, batch)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, MOST)))
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses, norms, case.model.state_dict()


def train_on_ranks(
    model: str,
    mesh: str,
    microbatches: int,
    dtype: torch.dtype = torch.float64,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Trajectory:
    """The same on this rank of a mesh; options: more of those of `compile`."""
    case = build(model, dtype)
    step = autopar.compile(
        case.model, mesh, microbatches=microbatches, loss_fn=case.loss_fn, **options
    )
    step.build(**case.batch)
    update, losses, norms = optimizer(step.parameters()), [], []
    for batch in batches(case):
        losses.append(step(**batch).item())
        norms.append(float(step.clip_grad_norm_(MOST)))
        update.step()
        update.zero_grad()
    return losses, norms, step.state_dict()


def world(mesh: str) -> int:
    size = 1
    for axis in mesh.split(","):
        size *= int(axis.partition("=")[2])
    return size


def check_trajectory(model, mesh, microbatches, options=None):
    losses, norms, weights = train_plainly(model)
    assert min(norms) > MOST
    arguments = (model, mesh, microbatches, torch.float64, options or {})
    results = run_ranks(train_on_ranks, world(mesh), *arguments)
    for got_losses, got_norms, got_weights in results:
        assert got_losses == pytest.approx(losses, rel=1e-9)
        assert got_norms == pytest.approx(norms, rel=1e-9)
        assert set(got_weights) == set(weights)
        for name, want in weights.items():
            torch.testing.assert_close(
                got_weights[name], want, rtol=1e-9, atol=1e-9, msg=name
            )
