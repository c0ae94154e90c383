"""Tensors and lists that one forward keeps in Python and the next one computes with: a
memory of the tokens before, a number that grows. A step is a program that begins each
time as the first forward did, so such a model is refused.

Forward is captured once more, with what the first one kept: tensors that depend on the
batch are stand-ins, and must not be read; what it keeps then must be as before, or else
make no difference to a third.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from autopar.capture.left_as_found import NUMBERS, AsFound, Change
from autopar.passes.capture.forward.kept_values import KeptValues
from autopar.passes.capture.forward.outside import outside_tensors
from autopar.passes.errors import CaptureError
from autopar.passes.traced import Traced

FIX = (
    "set it anew where forward begins, if it is of this batch alone; or pass it in the "
    "batch; or register it as a buffer, in which forward may add up or average what it "
    "computes"
)


@dataclass
class State:
    """The state that a captured forward keeps, beside the model's `own` parameters and
    buffers. before: all as it was before the first forward."""

    before: AsFound
    own: set[str]
    first: list[Change] | None = None
    kept: KeptValues = field(init=False)

    def __post_init__(self) -> None:
        self.kept = KeptValues(self._changed)

    def _changed(self) -> list[tuple[str, Any]]:
        changes = [c for c in self.before.changes() if c.where not in self.own]
        if self.first is None:
            self.first = changes
        return [(c.where, c.after) for c in changes]

    def changes(self) -> list[Change]:
        """The first forward's changes that can be made again, but for counters. Layers
        that are missing were left out by the capture."""
        pairs = zip(self.first or (), self.kept.first or (), strict=True)
        made = [replace(c, after=value) for c, (_, value) in pairs]
        return [
            c
            for c in made
            if not (isinstance(c.before, NUMBERS) and isinstance(c.after, NUMBERS))
            and not isinstance(c.before, nn.Module)
            and all(
                leaf is None or isinstance(leaf, (*NUMBERS, Tensor))
                for leaf in tree_flatten(c.after)[0]
            )
        ]


def refuse_state(state: State, run: Callable[[KeptValues], Traced]) -> None:
    """Raises CaptureError where the next forward would compute with what the first one
    keeps. state: of the first, which has been put back; run: captures another one."""
    if not (changes := state.changes()):
        return
    for change in changes:
        change.make()
    batch, after = state.kept.batch, State(state.before, state.own)
    names = [*batch.values(), *(change.where for change in changes)]
    with outside_tensors() as read:
        second = _run_with(after.kept, names[0], state.before, run)
    for x in read.keys() & batch.keys():
        raise kept_between(batch[x], read[x].source)
    kept = {change.place: change.after for change in changes}
    new = [c for c in after.changes() if not alike(kept.get(c.place), c.after)]
    if not new:
        return
    state.before.put_back()
    for change in after.changes():
        change.make()
    third = _run_with(KeptValues(), new[0].where, state.before, run)
    if not same(second, third):
        raise kept_between(new[0].where)


def _run_with(
    noting: KeptValues,
    where: str,
    before: AsFound,
    run: Callable[[KeptValues], Traced],
) -> Traced:
    """Captures a forward that finds what others have kept. Raises: CaptureError about
    that where it fails, if it does not fail without it as well."""
    try:
        return run(noting)
    except Exception as error:
        before.put_back()
        run(KeptValues())
        raise kept_between(where) from error


def kept_between(where: str, source: str = "") -> CaptureError:
    """The error about what one forward keeps and another one reads."""
    return CaptureError(
        f"forward keeps '{where}' and computes with it in the next step, which begins "
        "without it",
        source=source,
        fix=FIX,
    )


def alike(one: Any, other: Any) -> bool:
    """Whether two values have the same form and numbers."""
    (ones, form), (others, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(map(_equal, ones, others))


def _equal(x: Any, y: Any) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return type(x) is type(y) and bool(x == y)
    if x is y or (x.shape, x.dtype) != (y.shape, y.dtype):
        return x is y
    one, other = (v[(0,) * v.ndim] if is_one_number(v) else v for v in (x, y))
    return one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)


def is_one_number(x: Tensor) -> bool:
    """Whether it takes the memory of one, as a stand-in does."""
    return x.numel() > 0 and not any(x.stride())


def same(one: Traced, other: Traced) -> bool:
    """Whether two captures are of one computation."""
    if str(one.graph) != str(other.graph):
        return False
    return all(torch.equal(x, other.literals[k]) for k, x in one.literals.items())
