"""The model as torch.export is given it: called with a batch, down to its loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution

from ...errors import CaptureError
from ...replaced import replaced
from ..forward.call_model import call_model
from ..forward.compiling import Compiling
from ..forward.custom_functions import Functions
from ..forward.flex_attention import flex_as_attention
from ..forward.kept_values import KeptValues
from ..forward.known_values import KnownValues
from ..forward.listed_rows import rows_listed
from ..forward.own_collectives import OwnCollectives
from ..forward.scripted import scripts_as_python
from ..forward.torch_shapes import lstm_states_shaped
from ..forward.unseen import Unseen
from ..forward.values_read import capture_failed, reads_values


@dataclass
class Beside:
    """Names of what comes out beside the loss; metrics come first. assigned: buffers
    that forward gave new tensors, which come out after these. Apart from the module,
    whose attributes export puts back."""

    names: tuple[str, ...] = ()
    metrics: int = 0
    assigned: tuple[str, ...] = ()


class LossModule(nn.Module):
    """The model, called by keyword, which returns only its loss, metrics and the
    outputs that are wanted."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        static: dict,
        wanted: Sequence[str],
        metrics: Collection[str] | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.static = static
        self.wanted, self.metrics = wanted, metrics
        self.beside = Beside()
        self.by_name = False  # see `call_model`
        names = {id(p): name for name, p in model.named_parameters()}
        self.unseen = Unseen(KnownValues(dict(model.named_buffers())), names)
        self.functions = Functions()
        self.compiling = Compiling()
        self.kept = KeptValues()

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The loss, a scalar, and what else the model returns, of a batch's fields;
        and what it asked that is to be decided, bools."""
        before = dict(self.model.named_buffers())
        self.unseen.known.begin(before)
        guards = self.unseen.guards
        guards.begin_forward()
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
        self.kept.note(self.unseen.known)
        assigned = self._assigned(before)
        if self.metrics is not None:
            kept = {k: x for k, x in returned.metrics.items() if k in self.metrics}
            returned = replace(returned, metrics=kept)
        beside = returned.select(self.wanted)
        self.beside.names, self.beside.metrics = tuple(beside), len(returned.metrics)
        self.beside.assigned = tuple(assigned)
        loss = self.functions.add_to(returned.loss)
        return (loss, *beside.values(), *guards.questions, *assigned.values())

    def _assigned(self, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What buffers have after `self.count = self.count + 1`, which leaves no trace
        in the exported graph; but for tables that are made anew, of what stays as it
        is, and are the same in each step. Raises: CaptureError."""
        after = dict(self.model.named_buffers())
        new = {name: after.get(name) for name, x in before.items()}
        new = {name: x for name, x in new.items() if x is not before[name]}
        assigned: dict[str, torch.Tensor] = {}
        for name in sorted(new):
            x, of = new[name], self.unseen.known.buffers_of(new[name])
            if of is not None and not of & new.keys():
                continue
            kind = before[name].shape, before[name].dtype
            if x is None or (x.shape, x.dtype) != kind:
                raise CaptureError(
                    f"forward assigns to the model's buffer '{name}' "
                    + ("nothing" if x is None else f"a {x.dtype} of {tuple(x.shape)}")
                    + f", which is a {kind[1]} of {tuple(kind[0])}",
                    fix="keep it in an attribute that is no buffer, or assign a tensor "
                    "of its shape and dtype",
                )
            assigned[name] = x
        return assigned
