"""verify: run all ranks of a program in this process, and compare with the model.

Loss and every gradient, on the same batch, against the untouched model on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.comm import Comm
from autopar.executor import Executor
from autopar.match import check_model
from autopar.reference import reference_step
from autopar.shards import owns, put_shard, take_shard
from autopar.virtual import run_virtual
from passes.errors import AutoparError
from passes.program import Program

# Relative error that rounding explains, by dtype of the parameters.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
# A gradient this small, as a share of the model's typical one, is compared as if it
# were this large: a key's bias has none at all, as softmax does not see what it adds,
# and what is computed for it is rounding.
NOISE = 0.1


class VerificationFailed(AutoparError):
    """The program does not compute what the model computes."""


@dataclass(frozen=True)
class Verification:
    """errors: "loss" or parameter -> norm of the difference over norm of the reference
    (see `NOISE`).

    loss, reference_loss: of the same batch. tolerance: what rounding explains.
    """

    loss: float
    reference_loss: float
    errors: Mapping[str, float]
    tolerance: float

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.errors.items(), key=lambda item: item[1])

    @property
    def passed(self) -> bool:
        return all(error <= self.tolerance for error in self.errors.values())

    def check(self) -> Verification:
        """Raises VerificationFailed that names the worst parameter."""
        if not self.passed:
            name, error = self.worst
            raise VerificationFailed(
                f"'{name}' differs from the untouched model by {error:.1e}, more than "
                f"rounding explains ({self.tolerance:.0e})",
                fix="report this model and mesh; another mesh may be right meanwhile",
            )
        return self


def verify(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
) -> Verification:
    """Compare one step of all ranks with the model. The model needs real weights."""
    check_model(program, model)
    dtype = next(p.dtype for p in model.parameters())
    loss, grads = run_all_ranks(program, model, batch, seed)
    want_loss, want = reference_step(model, batch, loss_fn, seed << 32)
    noise = NOISE * root_mean_square(want.values())
    errors = {"loss": relative_error(loss, want_loss)}
    for name, grad in want.items():
        if name in grads:
            least = noise * grad.numel() ** 0.5
            errors[name] = relative_error(grads[name], grad, least)
    for name, grad in want.items():
        if name not in grads and bool(grad.any()):
            errors[name] = 1.0
    return Verification(
        loss.item(),
        want_loss.item(),
        errors,
        TOLERANCE.get(dtype, 2e-2) if tolerance is None else tolerance,
    )


def root_mean_square(tensors: Iterable[Tensor]) -> float:
    """Over the elements of all tensors."""
    found = [(x.double().square().sum().item(), x.numel()) for x in tensors]
    squares, count = (sum(column) for column in zip(*found, strict=True))
    return (squares / count) ** 0.5


def relative_error(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """|got - want| / max(|want|, least), the norms in double precision."""
    scale = max(want.double().norm().item(), least)
    difference = (got.double() - want.double()).norm().item()
    return difference / scale if scale else difference


def run_all_ranks(
    program: Program, model: nn.Module, batch: Mapping[str, Any], seed: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """One step on the virtual mesh: the loss, and whole gradients by name.

    Raises VerificationFailed when ranks that should agree do not.
    """
    wholes = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor)}

    def body(comm: Comm) -> tuple[Tensor, dict[str, Tensor]]:
        held = local_parameters(program, comm, wholes)
        executor = Executor(program, comm, held, buffers, seed)
        loss = executor.step(tensors)
        return loss, executor.grads

    results = run_virtual(program.mesh, program.plan.microbatches, body)
    losses = {loss.item() for loss, _ in results}
    if len(losses) != 1 and not all(x != x for x in losses):
        raise VerificationFailed(f"ranks do not agree on the loss: {sorted(losses)}")
    whole: dict[str, Tensor] = {}
    for name, spec in program.parameters.items():
        if spec.trainable and spec.stages:
            shards = [grads.get(name) for _, grads in results]
            whole[name] = assemble(program, name, shards)
    return results[0][0], whole


def local_parameters(
    program: Program, comm: Comm, wholes: Mapping[str, Tensor]
) -> dict[str, nn.Parameter]:
    """The rank's shards of the parameters that its stages hold."""
    mine = program.stages_of(comm.rank)
    return {
        name: nn.Parameter(
            take_shard(wholes[name].detach(), spec, program.mesh, comm.coords),
            requires_grad=spec.trainable,
        )
        for name, spec in program.parameters.items()
        if set(spec.stages) & set(mine)
    }


def assemble(program: Program, name: str, shards: list[Tensor | None]) -> Tensor:
    """The whole tensor from the shards of all ranks; replicas must agree."""
    spec, mesh = program.parameters[name], program.mesh
    first = next(s for s in shards if s is not None)
    whole = torch.full(spec.shape, float("nan"), dtype=first.dtype)
    held_by = tuple(program.schedule.stage_to_rank[s] for s in spec.stages)
    for rank, shard in enumerate(shards):
        if shard is not None and owns(spec, mesh, mesh.coords(rank), held_by):
            put_shard(whole, shard, spec, mesh, mesh.coords(rank))
    for rank, shard in enumerate(shards):
        if shard is None:
            continue
        mine = take_shard(whole, spec, mesh, mesh.coords(rank))
        if relative_error(shard, mine) > 1e-6:
            raise VerificationFailed(
                f"rank {rank} has another gradient of '{name}' than its replicas"
            )
    return whole
