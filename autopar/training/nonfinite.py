"""Losses and gradients that are not finite: a run stops, or leaves such steps out."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.passes.errors import AutoparError

ON_NONFINITE = ("stop", "skip")
EVERY = 10  # steps between looks, which wait for a GPU
NEVER = 1 << 62


class NonFiniteError(AutoparError):
    """A loss or a gradient that is infinite or not a number."""


def is_finite(loss: Tensor, norm: Tensor) -> bool:
    """Whether a step's loss and the norm of its gradients are; waits for a GPU."""
    return bool(_finite(loss, norm))


class FirstNonFinite:
    """The first step that was not finite. All ranks have the same, and look alike."""

    def __init__(self) -> None:
        self._step: Tensor | None = None

    def add(self, done: int, loss: Tensor, norm: Tensor) -> None:
        """Take note of a step, by its number from 1; waits for no GPU."""
        here = torch.where(_finite(loss, norm), NEVER, done)
        self._step = here if self._step is None else torch.minimum(self._step, here)

    def check(self) -> None:
        """Raises NonFiniteError, which names the step."""
        if self._step is not None and (step := int(self._step)) < NEVER:
            raise NonFiniteError(
                f"step {step}: the loss or a gradient is not finite",
                fix="use a lower --lr or a longer --warmup; or leave such steps out: "
                "--on-nonfinite skip",
            )


def _finite(loss: Tensor, norm: Tensor) -> Tensor:
    return loss.isfinite() & norm.isfinite()
