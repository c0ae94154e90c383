"""Errors of proofs, and the distance of two tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from autopar.passes.errors import AutoparError

ANOTHER_MESH = "report this model and mesh; another mesh may be right meanwhile"
# A gradient this small, as a share of the model's typical one, is compared as if it
# were this large: a key's bias has none at all, as softmax does not see what it adds,
# and what is computed for it is rounding.
NOISE = 0.1


class VerificationFailed(AutoparError):
    """The program does not compute what the model computes."""

    def __init__(
        self, message: str, *, source: str = "", fix: str = ANOTHER_MESH
    ) -> None:
        super().__init__(message, source=source, fix=fix)


def as_reals(x: Tensor) -> Tensor:
    """The tensor in float64; complex numbers as their two parts."""
    return (torch.view_as_real(x) if x.is_complex() else x).double()


def root_mean_square(tensors: Iterable[Tensor]) -> float:
    """The root mean square over the elements of all tensors."""
    sums = [(as_reals(x).square().sum().item(), x.numel()) for x in tensors]
    count = sum(n for _, n in sums)
    return (sum(squares for squares, _ in sums) / max(count, 1)) ** 0.5


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """The 2-norm of all."""
    return sum(as_reals(g).square().sum().item() for g in gradients.values()) ** 0.5


def relative_error(
    got: Tensor, want: Tensor, least: float = 0.0, size: Tensor | None = None
) -> float:
    """|got - want| / max(|size|, least), with norms in double precision. size: `want`,
    if None."""
    norm = torch.linalg.vector_norm
    scale = max(norm(as_reals(want if size is None else size)).item(), least)
    difference = norm(as_reals(got) - as_reals(want)).item()
    return difference / scale if scale else difference


def worse(error: float, other: float) -> float:
    """The greater of two errors; nan is greater than any."""
    return max(error, other, key=lambda x: (x != x, x))
