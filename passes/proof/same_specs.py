"""Whether parameters of a large program rest, and their gradients are summed, as those
of a small one."""

from __future__ import annotations

import re

from passes.graph import LAYER
from passes.program import ParameterSpec, Program

UNNAMED = re.compile(r"^d\d+$")


def find_other_spec(large: Program, small: Program) -> str | None:
    """The name of a parameter that is not as any of its kind in the small program, or
    a word for what else is different; None if there is none.

    Layers count as alike: which of them a parameter is in makes no difference.
    """
    known = {(_kind(n), _facts(s)) for n, s in small.parameters.items()}
    for name, spec in large.parameters.items():
        if (_kind(name), _facts(spec)) not in known:
            return name
    for what in ("loss_pending", "groups"):
        if set(getattr(large, what)) != set(getattr(small, what)):
            return what
    return None


def _kind(name: str) -> str:
    return LAYER.sub("*", name)


def _facts(spec: ParameterSpec) -> object:
    """All but sizes, and the names of stages."""
    dims = tuple(tuple("" if UNNAMED.match(d) else d for d in dim) for dim in spec.dims)
    several = len(spec.stages) > 1
    trained = spec.trainable and bool(spec.stages)
    return dims, spec.slots, spec.pending, spec.gathered, trained, several, spec.dtype
