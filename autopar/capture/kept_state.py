"""Tensors and lists that one forward keeps in Python and the next one computes with: a
memory of the tokens before, a number that grows. A step is a program that begins each
time as the first forward did, so such a model is refused.

Forward is captured once more, with what the first one kept: tensors that depend on the
batch are stand-ins, and must not be read; what it keeps then must be as before, or else
make no difference to a third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        return [c for c in self._made() if _is_data(c.after)]

    @property
    def is_data(self) -> bool:
        """Whether these are all: forward has kept nothing else, as a function. The hook
        by which a capture looks on is not forward's."""
        others = [c.after for c in self._made() if not _is_data(c.after)]
        return all(
            str(getattr(x, "__module__", "")).startswith("autopar.") for x in others
        )

    def _made(self) -> Iterator[Change]:
        pairs = zip(self.first or (), self.kept.first or (), strict=True)
        for c, (_, value) in pairs:
            counts = isinstance(c.before, NUMBERS) and isinstance(c.after, NUMBERS)
            if not counts and not isinstance(c.before, nn.Module):
                yield replace(c, after=value)


def _is_data(value: Any) -> bool:
    leaves = tree_flatten(value)[0]
    return all(x is None or isinstance(x, (*NUMBERS, Tensor)) for x in leaves)


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
        try:
            second = run(after.kept)
        except Exception as error:
            state.before.put_back()
            run(KeptValues())  # which fails in its own way, if it is not that
            if batch or state.is_data:
                raise kept_between(names[0]) from error
            return  # what it fails for is what was not made again
    for x in read.keys() & batch.keys():
        raise kept_between(batch[x], read[x].source)
    kept = {change.place: change.after for change in changes}
    new = [c for c in after.changes() if not alike(kept.get(c.place), c.after)]
    if not new:
        return
    state.before.put_back()
    for change in after.changes():
        change.make()
    try:
        third = run(KeptValues())
    except Exception as error:
        state.before.put_back()
        run(KeptValues())
        raise kept_between(new[0].where) from error
    if not same(second, third):
        raise kept_between(new[0].where)


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
