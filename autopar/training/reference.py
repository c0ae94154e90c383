"""The untouched model beside a run, to compare with."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from autopar.models.load import LoadedModel, ModelError
from autopar.plans.store import StoredPlan
from autopar.proof.reference import reference_step
from autopar.training.nonfinite import is_finite
from autopar.training.optimizer import make_optimizer, set_learning_rate
from autopar.training.options import RunOptions


class Reference:
    """The untouched model on one device, trained in the same way."""

    def __init__(
        self, loaded: LoadedModel, stored: StoredPlan, options: RunOptions
    ) -> None:
        if loaded.on_meta:
            raise ModelError(
                f"'{loaded.spec}' is too big for one device to compare with",
                fix="run without --reference",
            )
        self.model: nn.Module = loaded.model
        self.seed, self.options = stored.seed, options
        self.precision = stored.program.plan.lowering
        held = ((p, p.dim()) for p in self.model.parameters())
        self.optimizer = make_optimizer(held, options)

    def step(self, i: int, batch: Mapping[str, Tensor]) -> float:
        """One update; returns the loss before it."""
        key = (self.seed << 32) + i
        loss, grads = reference_step(
            self.model, batch, key=key, precision=self.precision
        )
        for name, p in self.model.named_parameters():
            p.grad = grads.get(name)
        limit = self.options.clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        set_learning_rate(self.optimizer, i, self.options)
        if self.options.on_nonfinite != "skip" or is_finite(loss, norm):
            self.optimizer.step()
        return loss.item()
