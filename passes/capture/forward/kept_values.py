"""What forward keeps of a batch in Python (an attribute of a module, an entry of a dict
that a hook fills): a step has no such place, and whoever reads it there is told.

What is made of constants alone, as a mask or a table, is the same in each step. Whether
the next forward reads what this one keeps is found out by who captures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ...nested import tensors
from ..forward.known_values import KnownValues

MOST = 3  # that are named
LAYER = re.compile(r"\.\d+(?=\.)")


def like_none(x: Tensor) -> Tensor:
    """A tensor as large, of a number that no other has; it takes no memory."""
    dtype = x.dtype
    is_integer = not (x.is_floating_point() or x.is_complex() or dtype == torch.bool)
    number = torch.iinfo(dtype).max // 3 if is_integer else float("nan")
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.tensor(number, dtype=dtype, device=x.device).expand(x.shape)


@dataclass
class KeptValues:
    """changed: yields (path, present value) of all that forward has changed so far; a
    path is as `blocks.0.attn.last`. first: all that the first forward changed, with
    tensors that outlive the capture: their values, or like none where these are not
    known. batch: paths of tensors that depend on the batch, by their ids."""

    changed: Callable[[], Iterable[tuple[str, Any]]] = tuple
    places: dict[str, None] = field(default_factory=dict)
    first: list[tuple[str, Any]] | None = None
    batch: dict[int, str] = field(default_factory=dict)

    def note(self, known: KnownValues) -> None:
        """Notes the places that a captured forward has changed, at its end."""
        changed = [*self.changed()]
        for where, value in changed:
            if any(map(known.is_of_batch, tensors(value))):
                self.places[LAYER.sub(".*", where)] = None
        if self.first is None:
            self.first = [
                (where, tree_map_only(Tensor, partial(self._lasting, known, where), x))
                for where, x in changed
            ]

    def _lasting(self, known: KnownValues, where: str, x: Tensor) -> Tensor:
        """A tensor in place of one of the capture's."""
        value = known.value(x)
        if value is None:
            value = like_none(x)
            if known.is_of_batch(x):
                self.batch[id(value)] = where
        return value

    def remarks(self) -> tuple[str, ...]:
        """What is to be known of a model that keeps something."""
        if not self.places:
            return ()
        named = ", ".join([*self.places][:MOST])
        more = f" and {n} more" if (n := len(self.places) - MOST) > 0 else ""
        return (
            f"forward keeps values of the batch in {named}{more}, which a step leaves "
            "as they were: to read one in step.metrics, let loss_fn return it, as by "
            "lambda loss, batch: {'loss': loss, 'name': model.name}",
        )
