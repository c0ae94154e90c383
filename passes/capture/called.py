"""Records the calls of a forward, layer by layer: two layers with the same calls of the
same arguments are one computation, whatever Python went through to get there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..capture.forward.on_meta import counts_rows
from ..layers import FIRST
from ..nested import tensors
from ..replaced import replaced

Call = tuple[Hashable, ...]


class NotInOrder(Exception):
    """Layers that are not called one after another, each once."""


class RowsCounted(Exception):
    """A forward that may go on as the number of rows says which data choose."""


class Calls(TorchFunctionMode):
    """Notes what is called of torch while layers run in order.

    parts: the calls before the layers, of each layer and what comes behind it, and
    after the last. A tensor in them is named by the call that made it: one of the same
    part, or of so many parts before, or, before the second layer, of that very part;
    literals are named by their numbers. Parameters and buffers of a part's own layer go
    by their names in it.
    """

    def __init__(self, model: nn.Module, path: str = "") -> None:
        super().__init__()
        self.model, self.path = model, path
        self.parts: list[list[Call]] = [[]]
        self.alive: list[Any] = []  # so that no id is given twice
        self.names: dict[int, str] = {}
        # Of each tensor: part, call, place in its result; the call alone of a literal.
        self.made: dict[int, Call] = {}
        self.versions: dict[int, int] = {}  # of what is written in place

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # what looks at a call is no call
            call = self.described(func, torch.is_grad_enabled(), args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            self.note(call, result, args if result is None else result)
        return result

    def note(self, call: Call, result: Any, changed: Any) -> None:
        """Notes a call, and what it made or wrote to."""
        if counts_rows(result):
            raise RowsCounted
        made = list(tensors(changed))
        if not made and result is not None:
            return  # it comes back as an argument, if it matters
        for place, x in enumerate(made):
            if self.versions.get(id(x)) != x._version:  # else as it came in
                where = len(self.parts) - 1, len(self.parts[-1]), place
                self.made[id(x)] = call if call[0] is torch.tensor else where
                self.versions[id(x)] = x._version
        self.alive.append(made)
        self.parts[-1].append((*call, *((x.shape, x.dtype) for x in made)))

    def described(self, *call: Any) -> Call:
        return tuple(map(self.describe, call))

    def describe(self, x: Any) -> Hashable:
        if isinstance(x, Tensor):
            return self.describe_tensor(x)
        if isinstance(x, tuple | list):
            return type(x).__name__, *map(self.describe, x)
        if isinstance(x, Mapping):
            return "dict", *((k, self.describe(v)) for k, v in x.items())
        if isinstance(x, slice):
            return "slice", *map(self.describe, (x.start, x.stop, x.step))
        if isinstance(x, bool | int | float | complex | str | None):
            return type(x).__name__, x
        self.alive.append(x)
        return x if isinstance(x, Hashable) else ("object", id(x))

    def describe_tensor(self, x: Tensor) -> Hashable:
        part = len(self.parts) - 1
        if self.versions.get(id(x)) != x._version:  # nobody has seen what wrote to it
            self.alive.append(x)
            return "tensor", id(x)
        if (place := self.made.get(id(x))) is not None:
            made = place[0]
            if made == part:
                return "own", *place[1:]
            if isinstance(made, int) and made > FIRST:
                return "back", part - made, *place[1:]
            return "part", *place
        name, own = self.names[id(x)], f"{self.path}.{part - FIRST}."
        if name.startswith(own):
            return "layer", name.removeprefix(own)
        return "model", name

    @contextlib.contextmanager
    def in_one(self, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Records a forward as a single part, whatever layers it has."""
        for named in (self.model.named_parameters, self.model.named_buffers):
            for name, x in named(remove_duplicate=False):
                self.names.setdefault(id(x), name)
                self.versions[id(x)] = x._version
        for name, x in batch.items():
            self.names[id(x)], self.versions[id(x)] = f"batch {name}", x._version
        with self, self.regions_noted():
            yield

    @contextlib.contextmanager
    def layer_by_layer(self, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Records a forward layer by layer. Raises: NotInOrder."""
        layers = list(self.model.get_submodule(self.path).children())
        handles = [
            layer.register_forward_pre_hook(self.beginning(FIRST + i))
            for i, layer in enumerate(layers)
        ]
        behind = FIRST + len(layers)
        handles.append(layers[-1].register_forward_hook(self.beginning(behind)))
        try:
            with self.in_one(batch):
                yield
        finally:
            for handle in handles:
                handle.remove()
        if len(self.parts) != behind + 1:
            raise NotInOrder

    @contextlib.contextmanager
    def regions_noted(self) -> Iterator[None]:
        """Records regions of autocast as they are entered and left: a capture heeds
        those of any device, and the state says nothing of a device that torch is not
        built for."""
        enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

        def entered(region: Any) -> Any:
            settings = region.device, region.fast_dtype, region._enabled
            self.parts[-1].append(self.described("autocast", *settings))
            return enter(region)

        def left(region: Any, *error: Any) -> Any:
            self.parts[-1].append(("autocast",))
            return leave(region, *error)

        entering = replaced(torch.autocast, "__enter__", entered)
        with entering, replaced(torch.autocast, "__exit__", left):
            yield

    def beginning(self, part: int) -> Callable[..., None]:
        """A hook that begins a part."""

        def begin(*_: Any) -> None:
            if len(self.parts) != part:
                raise NotInOrder
            self.parts.append([])

        return begin
