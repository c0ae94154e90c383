"""The norm of all gradients, in which each element of the model counts once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopar.passes.errors import AutoparError
from autopar.passes.program import Program
from autopar.passes.ranges import shown
from autopar.runtime.comm.comm import Comm
from autopar.runtime.parameters.shards import owns


def is_owner(program: Program, comm: Comm, name: str) -> bool:
    """Whether this rank is the first of those that hold the same part of it."""
    spec, schedule = program.parameters[name], program.schedule
    ranks = tuple(schedule.stage_to_rank[s] for s in spec.stages)
    return owns(spec, program.mesh, comm.coords, ranks)


def gradient_norm(
    program: Program, comm: Comm, gradients: Mapping[str, Tensor]
) -> Tensor:
    """The global 2-norm, a float64 scalar on `comm.device`; all ranks must call it.

    gradients: this rank's shards, by name, on any device.
    """
    total = torch.zeros((), dtype=torch.float64, device=comm.device)
    own = [grad for name, grad in gradients.items() if is_owner(program, comm, name)]
    own = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in own]
    if own:  # by a few kernels for all of them
        norms = torch.stack(torch._foreach_norm(own, 2, dtype=torch.float64))
        total += norms.square_().sum().to(total.device)
    comm.reduce_ranks_(total, tuple(range(program.mesh.size)))
    return total.sqrt()


@torch.no_grad()
def checked_norm(max_norm: float) -> float:
    """A norm to clip to, as it is. Raises AutoparError for what none can be."""
    known = isinstance(max_norm, int | float | Tensor)
    if not known or not float(max_norm) >= 0:  # nan would make all gradients nan
        raise AutoparError(
            f"gradients cannot be clipped to a norm of {shown(max_norm)}",
            fix="give a number of 0 or more, as step.clip_grad_norm_(1.0)",
        )
    return max_norm


def clip_(
    program: Program,
    comm: Comm,
    max_norm: float,
    gradients: Mapping[str, Tensor],
    flats: Sequence[Tensor],
) -> Tensor:
    """Scale gradients so that their global norm is at most max_norm; returns the norm
    before. All ranks must call it.

    flats: buffers of gradients, of which these are parts, but for some that users set.
    """
    # Plain tensors: of shards, users must not take norms.
    grads = {name: g.as_subclass(Tensor) for name, g in gradients.items()}
    norm = gradient_norm(program, comm, grads)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    inside = {flat.untyped_storage().data_ptr() for flat in flats}
    loose = [g for g in grads.values() if g.untyped_storage().data_ptr() not in inside]
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in (*flats, *loose):
        alike.setdefault((grad.dtype, grad.device), []).append(grad)
    for (dtype, device), own in alike.items():
        torch._foreach_mul_(own, scale.to(device, dtype))
    return norm
