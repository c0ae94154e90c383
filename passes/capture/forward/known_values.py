"""Values of what is computed of buffers, of tensors outside of the model and of numbers
alone, while a model is captured: forward may ask about them, as whether a table has
been filled or how far its positions go, and so may a teacher that a loss function asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ...nested import tensors
from ..forward.values_read import UNKNOWN

READS = (Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.item)


class _AnyValue(Exception):
    """A value is another one each time."""


class _Certain(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        empty = "empty" in func._schema.name
        if empty or torch.Tag.nondeterministic_seeded in func.tags:
            raise _AnyValue
        return func(*args, **(kwargs or {}))


def _value(buffer: Tensor) -> Tensor:
    if buffer.is_meta:
        raise _AnyValue
    return buffer


def _evaluated(make: Callable[[], Any]) -> Any:
    """A value made outside of the capture; None if it differs each time."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), _Certain():
        try:
            return make()
        except _AnyValue:
            return None


def _base(x: Tensor) -> Tensor:
    """The tensor that x is a view of, or x itself."""
    with torch._C.DisableTorchFunction():  # it is no call of the user's
        return x if x._base is None else x._base


@dataclass(frozen=True)
class _Made:
    """A tensor of the capture, as of which write, how to make it with its values, and
    of which buffers."""

    x: Tensor  # so that no other has its id
    version: int
    make: Callable[[], Any]
    buffers: frozenset[str]


class KnownValues:
    """buffers: the model's own, by name, which programs do not change. A single number
    may count steps, which the user's loop does: that is not known. asked: names of
    those that an answer depends on."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.buffers = {k: v for k, v in buffers.items() if v.numel() > 1}
        self.asked: set[str] = set()
        self.made: dict[int, _Made] = {}  # tensors of the capture by their id
        # Those made of what is constant, whether or not their values are known; and,
        # with what it is a view of, a tensor that others were written into since.
        self.constants: dict[int, Tensor] = {}
        self.versions: dict[int, int] = {}
        self.tainted: dict[int, Tensor] = {}

    def begin(self, captured: Mapping[str, Tensor]) -> None:
        """captured: the buffers, as they are in a capture."""
        for noted in (self.made, self.constants, self.versions, self.tainted):
            noted.clear()
        for name, x in captured.items():
            self._note_constant(x)
            if name in self.buffers:
                value = partial(_value, self.buffers[name])
                self.made[id(x)] = _Made(x, x._version, value, frozenset([name]))

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remembers how a call would be made with the values."""
        read = {id(x): x for x in tensors((args, kwargs))}
        of_batch = any(map(self.is_of_batch, read.values()))
        for x in map(_base, read.values()):
            if of_batch and self.versions.get(id(x), x._version) != x._version:
                self.tainted[id(x)] = x
            self.versions[id(x)] = x._version
        for x in () if of_batch else tensors(result):
            self._note_constant(x)
        if not isinstance(result, Tensor) or id(result) in read:
            return
        known = {key: self._made(x) for key, x in read.items()}
        made = {key: one for key, one in known.items() if one is not None}
        if len(made) < len(read):
            return
        if any(isinstance(n, UNKNOWN) for n in tree_leaves((args, kwargs))):
            return
        names = frozenset[str]().union(*(one.buffers for one in made.values()))

        def make() -> Any:
            own = tree_map_only(Tensor, lambda x: made[id(x)].make(), (args, kwargs))
            return func(*own[0], **own[1])

        self.made[id(result)] = _Made(result, result._version, make, names)

    def read(self, func: Any, x: Any) -> Any:
        """The result of a call that reads a number; None where it is unknown."""
        made = self.made.get(id(x)) if func in READS else None
        if made is None or made.version != x._version:
            return None
        value = _evaluated(lambda: func(made.make()))
        if value is not None:
            self.asked |= made.buffers
        return value

    def value(self, x: Tensor) -> Tensor | None:
        """A tensor with its values, where they are known."""
        made = self._made(x)
        return None if made is None else _evaluated(made.make)

    def is_of_batch(self, x: Tensor) -> bool:
        """Whether a tensor depends on more than constants: the batch, or weights."""
        if type(x) in (Tensor, nn.Parameter) and not x.is_meta:
            return False
        return id(x) not in self.constants or id(_base(x)) in self.tainted

    def _note_constant(self, x: Tensor) -> None:
        self.constants[id(x)] = x
        self.versions[id(_base(x))] = x._version

    def buffers_of(self, x: Any) -> frozenset[str] | None:
        """The buffers that a tensor was computed from, if only they and constants went
        into it; else None."""
        made = self._made(x) if isinstance(x, Tensor) else None
        return None if made is None else made.buffers

    def _made(self, x: Tensor) -> _Made | None:
        """How x was made, if known. Tensors from outside of the capture have their
        values: `passes.capture.forward.outside` refuses steps once these have
        changed."""
        if type(x) in (Tensor, nn.Parameter) and not x.is_meta:
            return _Made(x, x._version, lambda: x, frozenset())
        made = self.made.get(id(x))
        return made if made is not None and made.version == x._version else None
