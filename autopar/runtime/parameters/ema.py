"""Averages of the weights over updates, of what each rank holds.

An average is of each element by itself, so that parts of it are the averages of parts:
ranks tell each other nothing, whatever the plan. As
`torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)` makes it: the
first update takes the weights, and later ones average = decay average + (1 - decay)
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autopar.passes.errors import AutoparError
from autopar.passes.ranges import check_range


class AverageError(AutoparError):
    """An average of weights is impossible."""


class Ema:
    """The exponential moving average of a rank's parameters.

    parameters: those to average, by name, whenever they are read; parts of the model's.
    Averages are in float32 at least.
    """

    def __init__(
        self, parameters: Callable[[], Mapping[str, nn.Parameter]], decay: float
    ) -> None:
        check_range("ema", decay, AverageError)
        self._parameters, self.decay = parameters, decay
        self.updates = 0
        self._applied = False
        self.averages = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in parameters().items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Updates the averages, after each `optimizer.step()`, on all ranks alike.

        Raises: AverageError while averages are in the place of the weights.
        """
        if self._applied:
            raise AverageError(
                "the weights are averages here: there is nothing to add to these",
                fix="call step.ema.update() outside of `with step.ema.applied()`",
            )
        held = self._parameters()
        averages = [self.averages[name] for name in held]
        weights = [p.detach().to(self.averages[name].dtype) for name, p in held.items()]
        if averages and not self.updates:
            torch._foreach_copy_(averages, weights)
        elif averages:
            torch._foreach_lerp_(averages, weights, 1 - self.decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The context in which averages are in the place of the weights, for
        evaluations, state dicts and files; takes a copy of the weights meanwhile.

        Raises: AverageError within another one.
        """
        if self._applied:
            raise AverageError(
                "the weights are averages already", fix="leave the inner one out"
            )
        held = self._parameters()
        kept = {name: p.detach().clone() for name, p in held.items()}
        self._applied = True
        try:
            _put(held, self.averages)
            yield
        finally:
            _put(held, kept)
            self._applied = False


@torch.no_grad()
def _put(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, p in parameters.items():
        p.copy_(values[name])
