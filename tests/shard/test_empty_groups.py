"""An optimizer of parameters of which a rank of a pipeline holds none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run_ranks
from torch import Tensor
from trajectories import batches, build

import autopar
from autopar.passes.program import Program


def optimizers(named: Any) -> list[torch.optim.Optimizer]:
    """One for the first layer, one for the others; a group may be empty, where a list
    may not."""
    first, rest = [], []
    for name, p in named:
        (first if ".0." in name else rest).append(p)
    return [
        torch.optim.AdamW([{"params": first}], lr=1e-2),
        torch.optim.SGD([{"params": rest}], lr=1e-1),
    ]


def trained(named: Any, run: Callable[..., Any]) -> None:
    """Trains the named parameters; run: gives them gradients."""
    both = optimizers(named)
    for batch in batches(build("plain")):
        run(**batch)
        for update in both:
            update.step()
            update.zero_grad()


def on_rank(program: Program) -> tuple[int, dict[str, Tensor]]:
    case = build("plain")
    step = autopar.compile(case.model, program.mesh, program=program)
    step.build(**case.batch)
    named = list(step.named_parameters())
    groups = [group for update in optimizers(named) for group in update.param_groups]
    trained(named, step)
    return sum(not group["params"] for group in groups), step.state_dict()


@pytest.mark.slow
def test_a_group_may_be_empty_on_a_rank() -> None:
    model = build("plain").model
    trained(model.named_parameters(), lambda **batch: model(**batch)[1].backward())
    results = run_ranks(on_rank, 2, build("plain").proved("pp=2", 2))
    assert [empty for empty, _ in results] == [0, 1]
    for _, weights in results:
        for name, want in model.state_dict().items():
            torch.testing.assert_close(weights[name], want, rtol=1e-9, atol=1e-9)
