"""The model as torch.export is given it: called with a batch, down to its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution

from ..capture.call_model import call_model
from ..capture.compiling import Compiling
from ..capture.custom_functions import Functions
from ..capture.flex_attention import flex_as_attention
from ..capture.known_values import KnownValues
from ..capture.listed_rows import rows_listed
from ..capture.own_collectives import OwnCollectives
from ..capture.scripted import scripts_as_python
from ..capture.torch_shapes import lstm_states_shaped
from ..capture.unseen import Unseen
from ..capture.values_read import capture_failed, reads_values
from ..errors import CaptureError
from ..replaced import replaced


@dataclass
class Beside:
    """Names of what comes out beside the loss; metrics come first. Apart from the
    module, whose attributes export puts back."""

    names: tuple[str, ...] = ()
    metrics: int = 0


class LossModule(nn.Module):
    """The model, called by keyword, with only its loss, metrics and what is wanted
    coming out."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        static: dict,
        wanted: Sequence[str],
        with_metrics: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.static = static
        self.wanted, self.with_metrics = wanted, with_metrics
        self.beside = Beside()
        self.by_name = False  # see `call_model`
        names = {id(p): name for name, p in model.named_parameters()}
        self.unseen = Unseen(KnownValues(dict(model.named_buffers())), names)
        self.functions = Functions()
        self.compiling = Compiling()

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The loss, a scalar, and what else the model returns, of a batch's fields."""
        before = dict(self.model.named_buffers())
        self.unseen.known.begin(before)
        guards = self.unseen.guards
        guards.asked.clear()
        guards.pieces.begin()
        with (
            OwnCollectives(),
            self.unseen,
            rows_listed(guards.hit, guards.pieces.listed),
            self.functions.reading(),
            self.compiling.answers(),
            flex_as_attention(),
            lstm_states_shaped(),
            # Torch looks into what they are given, up to 2.14: there are no values.
            replaced(Distribution, "_validate_args", False),
            scripts_as_python(),
        ):
            fields = {**batch, **self.static}
            try:
                returned = call_model(self.model, fields, self.loss_fn, self.by_name)
            except RuntimeError as error:
                if not reads_values(error):
                    raise
                # Here, as torch prints all that it has traced so far.
                read = self.unseen.read
                raise capture_failed(error, self, fields, read) from error
        self._refuse_new_buffers(before)
        if not self.with_metrics:
            returned = replace(returned, metrics={})
        beside = returned.select(self.wanted)
        self.beside.names, self.beside.metrics = tuple(beside), len(returned.metrics)
        return (self.functions.add_to(returned.loss), *beside.values())

    def _refuse_new_buffers(self, before: Mapping[str, torch.Tensor]) -> None:
        """`self.count = self.count + 1` leaves no trace in the exported graph. A table
        that is made anew, of what stays as it is, is the same in each step."""
        after = dict(self.model.named_buffers())
        new = {name for name, x in before.items() if after.get(name) is not x}
        for name in sorted(new):
            of = self.unseen.known.buffers_of(after.get(name))
            if of is None or of & new:
                raise CaptureError(
                    f"forward assigns a new tensor to the model's buffer '{name}', "
                    "which has no meaning when ranks run different microbatches",
                    fix="keep running statistics out of forward, or freeze them with "
                    ".eval()",
                )
