"""Checkpoints of optimizers that store something for several parameters, or ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from test_whole_updates import HALF, STEPS, build, train, train_plainly
from torch import nn
from torch.optim import SGD, Optimizer

import autopar
from autopar.passes.errors import AutoparError
from autopar.passes.program import Program


class Stacked(Optimizer):
    """Momentum, kept for all matrices of a group by its first, as nanochat's Muon."""

    def __init__(self, groups: Iterable[Any]) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            held = group["params"]
            if not held:
                continue
            grads = torch.stack([p.grad for p in held])
            state = self.state[held[0]]
            mean = state.setdefault("mean", torch.zeros_like(grads)).lerp_(grads, 0.1)
            rows = state.setdefault("rows", torch.zeros_like(grads[..., :1]))
            rows += grads.norm(dim=-1, keepdim=True)
            for p, change in zip(held, mean / (1 + rows), strict=True):
                p.sub_(change, alpha=group["lr"] / float(1 + p.norm()))


def stacked(params: list[nn.Parameter]) -> Optimizer:
    """Of vectors as long as a token, of which each layer has several."""
    return Stacked(
        [{"params": [p for p in params if p.shape == (32,) and p.requires_grad]}]
    )


class TakingTurns(SGD):
    """Each rank updates some parameters, and tells the others, as Keller Jordan's Muon:
    it stores nothing of those that it does not update."""

    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        kept = [p.grad for p in held]
        for i, p in enumerate(held):
            if i % ranks != rank:
                p.grad = None
        super().step()
        for i, p in enumerate(held):
            p.grad = kept[i]
            if ranks > 1:
                dist.broadcast(p.data, i % ranks)


def saved_by_turns(program: Program, folder: Path) -> str:
    case = build("plain")
    step = autopar.compile(case.model, program.mesh, program=program)
    step.build(**case.batch)
    optimizer = TakingTurns(step.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        step(**case.batch)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(AutoparError) as told:
        step.save(folder, optimizer)
    assert not list(folder.iterdir())
    return str(told.value)


def test_what_one_of_the_ranks_stores_is_not_left_out(tmp_path: Path) -> None:
    program = build("plain").proved("dp=2")
    for said in run_ranks(saved_by_turns, 2, program, tmp_path):
        assert "'momentum_buffer' of 'tokens.weight' on rank 0 is not that on" in said
        assert "use its form for one device" in said


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [(stacked, "pp=2", "dp=2"), (stacked, "dp=2", "pp=2")],
)
def test_another_mesh_goes_on(
    make: Callable[[list[nn.Parameter]], Optimizer],
    before: str,
    after: str,
    tmp_path: Path,
) -> None:
    want = train_plainly("plain", make)
    case = build("plain")
    first, then = case.proved(before), case.proved(after)
    run_ranks(train, 2, "plain", first, make, 0, HALF, tmp_path)
    for state in run_ranks(train, 2, "plain", then, make, HALF, STEPS, tmp_path):
        for name, value in want.items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-8, atol=1e-8, msg=name
            )
