"""Norms of gradients, in which each element of the model counts once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopar.passes.errors import AutoparError
from autopar.passes.program import Program
from autopar.passes.ranges import shown
from autopar.runtime.comm.comm import Comm
from autopar.runtime.parameters.shards import is_owner


def gradient_norm(
    program: Program, comm: Comm, gradients: Mapping[str, Tensor]
) -> Tensor:
    """The global 2-norm, a float64 scalar on `comm.device`; all ranks must call it.

    gradients: this rank's shards, by name, on any device.
    """
    total = torch.zeros((), dtype=torch.float64, device=comm.device)
    if squares := _squares(program, comm, gradients):
        total += torch.stack([*squares.values()]).sum().to(total.device)
    comm.reduce_ranks_(total, comm.everyone)
    return total.sqrt()


def gradient_norms(
    program: Program, comm: Comm, gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The 2-norm of each gradient, by the model's own name of the parameter: float64
    scalars on `comm.device`, the same on all ranks, which must all call it. Parameters
    without a gradient are left out.

    gradients: this rank's shards, by name, on any device.
    """
    places = {source: i for i, source in enumerate(program.sources)}
    square_of = _squares(program, comm, gradients)
    # Of each its square, and how many shards have a gradient.
    total = torch.zeros(len(places), 2, dtype=torch.float64, device=comm.device)
    if square_of:
        sources = [program.parameters[name].part.source for name in square_of]
        rows = torch.tensor([places[source] for source in sources])
        squares = torch.stack([*square_of.values()]).to(total.device)
        counted = torch.stack([squares, torch.ones_like(squares)], 1)
        total.index_add_(0, rows.to(total.device), counted)
    comm.reduce_ranks_(total, comm.everyone)
    norms, shards = total[:, 0].sqrt(), total[:, 1].tolist()
    return {name: norms[i] for name, i in places.items() if shards[i]}


def _squares(
    program: Program, comm: Comm, gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Sums of squares of the shards that this rank owns, float64."""
    owned = [name for name in gradients if is_owner(program, comm.coords, name)]
    # Plain tensors: of shards, users must not take norms.
    grads = [gradients[name].as_subclass(Tensor) for name in owned]
    real = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
    if not real:
        return {}
    norms = torch._foreach_norm(real, 2, dtype=torch.float64)  # by a few kernels
    return dict(zip(owned, torch._foreach_pow(norms, 2), strict=True))


@torch.no_grad()
def checked_norm(max_norm: float) -> float:
    """The norm to clip to. Raises AutoparError if it is no possible norm."""
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
    grads = {name: g.as_subclass(Tensor) for name, g in gradients.items()}
    norm = gradient_norm(program, comm, grads)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    inside = {flat.untyped_storage().data_ptr() for flat in flats}
    loose = [g for g in grads.values() if g.untyped_storage().data_ptr() not in inside]
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in (*flats, *loose):
        alike.setdefault((grad.dtype, grad.device), []).append(grad)
    for (dtype, device), grads_alike in alike.items():
        torch._foreach_mul_(grads_alike, scale.to(device, dtype))
    return norm
