"""What forward keeps of a batch in Python (an attribute of a module, an entry of a dict
that a hook fills): a step has no such place, and whoever reads it there is told.

What is no tensor is compared by who captures, and what is made of constants alone, as a
mask or a table, is the same in each step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ...nested import tensors
from ..forward.known_values import KnownValues

MOST = 3  # that are named
LAYER = re.compile(r"\.\d+(?=\.)")


@dataclass
class KeptValues:
    """changed: gives (where, what is there now) of all that forward has changed so far;
    where: `blocks.0.attn.last`."""

    changed: Callable[[], Iterable[tuple[str, Any]]] = tuple
    places: dict[str, None] = field(default_factory=dict)

    def note(self, known: KnownValues) -> None:
        """Looks at what a forward that is captured has changed, at its end."""
        for where, value in self.changed():
            if any(known.buffers_of(x) is None for x in tensors(value)):
                self.places[LAYER.sub(".*", where)] = None

    def remarks(self) -> tuple[str, ...]:
        """What is to be known of a model that keeps something."""
        if not self.places:
            return ()
        named = ", ".join([*self.places][:MOST])
        more = f" and {n} more" if (n := len(self.places) - MOST) > 0 else ""
        return (
            f"forward keeps values of the batch in {named}{more}, which a step leaves "
            "as they were: to read one after a step, return it beside the loss, as "
            "{'loss': loss, 'name': value}, and read step.metrics",
        )
