"""Values of what a model computes of its buffers alone, while it is captured: a forward
may ask about them, as whether a table has been filled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

READS = (Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.item)


class KnownValues:
    """buffers: the model's own, by name, which programs do not change. A single number
    may count steps, which the user's loop does: that is not known."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.buffers = {
            k: v for k, v in buffers.items() if not v.is_meta and v.numel() > 1
        }
        # Tensors of the capture by their id, as of which write, and how they are made.
        self.made: dict[int, tuple[Tensor, int, Callable[[], Any]]] = {}

    def begin(self, captured: Mapping[str, Tensor]) -> None:
        """captured: the buffers, as they are in a capture."""
        self.made.clear()
        for name, x in captured.items():
            if name in self.buffers:
                self.made[id(x)] = x, x._version, partial(self.buffers.get, name)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remembers how a call would be made with the values."""
        if not isinstance(result, Tensor) or not self.made:
            return
        read = {id(x): x for x in _tensors((args, kwargs))}
        if read and id(result) not in read and all(map(self._has, read.values())):
            makers = {key: self.made[key][2] for key in read}

            def make() -> Any:
                own = tree_map_only(Tensor, lambda x: makers[id(x)](), (args, kwargs))
                return func(*own[0], **own[1])

            self.made[id(result)] = result, result._version, make

    def read(self, func: Any, x: Any) -> Any:
        """What a call that reads a number gives; None where it is not known."""
        if func not in READS or not isinstance(x, Tensor) or not self._has(x):
            return None
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return func(self.made[id(x)][2]())

    def _has(self, x: Tensor) -> bool:
        _, version, _ = self.made.get(id(x), (x, None, None))
        return version == x._version


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for one in tree:
            yield from _tensors(one)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))
