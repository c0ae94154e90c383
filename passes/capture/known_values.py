"""Values of what a model computes of its buffers alone, while it is captured: a forward
may ask about them, as whether a table has been filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ..nested import tensors

READS = (Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.item)


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
        self.buffers = {
            k: v for k, v in buffers.items() if not v.is_meta and v.numel() > 1
        }
        self.asked: set[str] = set()
        self.made: dict[int, _Made] = {}  # tensors of the capture by their id

    def begin(self, captured: Mapping[str, Tensor]) -> None:
        """captured: the buffers, as they are in a capture."""
        self.made.clear()
        for name, x in captured.items():
            if name in self.buffers:
                value = partial(self.buffers.get, name)
                self.made[id(x)] = _Made(x, x._version, value, frozenset([name]))

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remembers how a call would be made with the values."""
        if not isinstance(result, Tensor) or not self.made:
            return
        read = {id(x): x for x in tensors((args, kwargs))}
        if read and id(result) not in read and all(map(self._has, read.values())):
            made = {key: self.made[key] for key in read}
            names = frozenset[str]().union(*(one.buffers for one in made.values()))

            def make() -> Any:
                own = tree_map_only(
                    Tensor, lambda x: made[id(x)].make(), (args, kwargs)
                )
                return func(*own[0], **own[1])

            self.made[id(result)] = _Made(result, result._version, make, names)

    def read(self, func: Any, x: Any) -> Any:
        """What a call that reads a number gives; None where it is not known."""
        if func not in READS or not isinstance(x, Tensor) or not self._has(x):
            return None
        made = self.made[id(x)]
        self.asked |= made.buffers
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return func(made.make())

    def _has(self, x: Tensor) -> bool:
        made = self.made.get(id(x))
        return made is not None and made.version == x._version
