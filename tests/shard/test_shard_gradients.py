"""Gradients that know that they are a part of the whole ones, and collectives of a
loop's own, which would mix parts."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from plans import batch_of, made, small_program
from processes import run_ranks
from torch import Tensor, nn

from autopar.passes.errors import AutoparError
from autopar.passes.program import Program
from autopar.runtime.parameters.shard_gradient import ShardError, ShardGradient
from autopar.step import Step


def adding_up(grad: Tensor) -> Tensor:
    """A buffer of a loop's own."""
    (buffer,) = buffers = [torch.zeros(4, 5)]
    for own in buffers:
        own += grad
    return buffer


def test_gradients_of_shards_are_tensors_but_for_their_norms() -> None:
    x = torch.randn(4, 5)
    grad = x.as_subclass(ShardGradient)
    norms: list[Callable[[], Any]] = [
        lambda: grad.norm(),
        lambda: torch.norm(grad.data, 2),
        lambda: torch.linalg.vector_norm(grad.detach().float()),
        lambda: (grad**2).sum(),
        lambda: (grad * grad).mean(),
        lambda: grad.abs().max(),
        lambda: grad.flatten().dot(grad.view(-1)),
        lambda: torch.cat([grad.flatten(), grad.clone().ravel()]).norm(),
        lambda: torch.nn.utils.parameters_to_vector([grad]).norm(),
        lambda: torch.stack([grad, grad]).std(),
        lambda: torch.median(grad),
        lambda: grad.quantile(0.5),
        lambda: torch.isnan(grad).any(),
        lambda: (~grad.isfinite()).count_nonzero(),
        lambda: grad.square().sum(-1).sum(),
        lambda: grad.pow(2).sum(dim=None),
        lambda: torch.einsum("ij,ij->", grad, grad),
        lambda: torch.nansum(grad * grad),
        lambda: grad.view(-1) @ grad.view(-1),
        lambda: torch.inner(grad.flatten(), grad.flatten()),
        lambda: torch.cosine_similarity(grad.flatten(), x.flatten(), 0),
        lambda: torch.cosine_similarity(grad, x),
        lambda: torch.nn.functional.normalize(grad, dim=-1),
        lambda: grad.mul(2).renorm(2, 0, 1.0),
        lambda: torch.linalg.svd(grad, full_matrices=False),
        lambda: torch.linalg.qr(grad.T)[0],
        lambda: grad.detach().cpu().numpy(),
        lambda: grad.abs().tolist(),
        lambda: np.asarray(grad),
        lambda: torch.histc(grad, 10),
        lambda: (-grad / 3 - 1).norm(),
        lambda: grad.nan_to_num()[None].bfloat16().norm(),
        lambda: (grad != 0).sum(),
        lambda: torch.where(grad.abs() < 1, grad, 0.0).sum(),
        lambda: grad.unbind()[0].norm(),
        lambda: torch._foreach_mul([grad], 2.0)[0].norm(),
        lambda: torch.sum(input=deepcopy(grad)),
        lambda: adding_up(grad).norm(),
    ]
    for norm in norms:
        with pytest.raises(AutoparError, match=r"step\.clip_grad_norm_\(max_norm\)"):
            norm()
    assert torch.equal(grad, x) and torch.equal(grad.isnan(), x.isnan())
    assert torch.equal(grad.sum(0), x.sum(0)) and float(grad[1, 2]) == float(x[1, 2])
    saved = io.BytesIO()
    torch.save([grad], saved)
    saved.seek(0)
    assert type(torch.load(saved, weights_only=True)[0]) is Tensor
    buffer = torch.zeros(4, 5).mul_(0.9).add_(grad)
    parameter = nn.Parameter(torch.zeros(4, 5))
    with torch.no_grad():
        parameter -= 0.1 * grad
        parameter.add_(grad, alpha=0.1)
    assert type(buffer) is ShardGradient and type(parameter) is nn.Parameter
    assert torch.allclose(parameter, torch.zeros(4, 5), atol=1e-6)
    assert float(grad.as_subclass(Tensor).norm()) == float(x.norm())
    assert not grad.new_zeros(()) and type(deepcopy([grad])[0]) is ShardGradient


# --- collectives of a loop's own -----------------------------------------------------


def averaged(step: Step) -> None:
    for p in step.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def summed_at_once(step: Step) -> None:
    dist.all_reduce(torch.cat([p.grad.flatten() for p in step.parameters()]))


def weights_of_the_first_rank(step: Step) -> None:
    for p in step.parameters():
        dist.broadcast(p.data, 0)


def a_loss_of_its_own(step: Step) -> None:
    sums = torch.ones(2)
    dist.all_reduce(sums)
    dist.all_reduce(torch.empty(0))
    assert sums.tolist() == [2, 2]


HABITS = [averaged, summed_at_once, weights_of_the_first_rank, a_loss_of_its_own]


def refusals(program: Program) -> list[str]:
    """What is said of each habit, in `HABITS`' order."""
    step, said = made(program), []
    for habit in HABITS:
        step.zero_grad()
        step(**batch_of(0))
        try:
            habit(step)
            said.append("")
        except ShardError as error:
            said.append(
                f"{error.source.rpartition('/')[-1]} {error.message} {error.fix}"
            )
    return said


@pytest.mark.parametrize(
    ("mesh", "microbatches", "zero", "expected"),
    [
        ("tp=2", 1, 0, [True, True, True]),
        pytest.param("dp=2", 1, 2, [True, True, True], marks=pytest.mark.slow),
        pytest.param("pp=2", 2, 0, [True, True, True], marks=pytest.mark.slow),
        pytest.param("dp=2", 1, 0, [True, False, False], marks=pytest.mark.slow),
    ],
)
def test_what_would_mix_parts_is_refused(mesh, microbatches, zero, expected) -> None:
    program = small_program(mesh, microbatches, zero=zero)
    for said in run_ranks(refusals, 2, program, seconds=200):
        assert [bool(text) for text in said] == [*expected, False], said
        for text in filter(None, said):
            assert (
                text.startswith("test_shard_gradients.py:") and "leave it out" in text
            )
