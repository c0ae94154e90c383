"""Peak bytes of live tensors in one process: the same count for every runtime.

A process's resident memory says little, because allocators keep pages; this counts
storages instead: parameters, gradients, activations, buffers and optimizer state.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts every storage that is alive on entry or made inside, until it dies.

    `now` and `peak` are bytes. Buffers inside the communication library are not seen.
    resizing: look after each op whether storages have grown or shrunk, as FSDP's do,
    and what is let go of when a message has arrived.
    """

    def __init__(self, resizing: bool = False) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.resizing = resizing
        self.sizes: dict[int, int] = {}
        self.storages = weakref.WeakValueDictionary[int, UntypedStorage]()

    def __enter__(self) -> "LiveBytes":
        gc.collect()  # what nobody can reach would die at any moment
        for item in gc.get_objects():
            # type(), as isinstance() would wake up proxies that merely look alike
            if issubclass(type(item), Tensor):
                self.watch(item)
        return super().__enter__()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(is_wrapper(kind) for kind in types):
            return NotImplemented  # let DTensor unwrap: its local ops come back here
        self.resized()  # since the last op
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves((args, kwargs, result)):
            if isinstance(item, Tensor):
                self.watch(item)
        self.resized()
        return result

    def resized(self) -> None:
        """Count storages anew, if they may have grown or shrunk."""
        if self.resizing:
            for where, storage in list(self.storages.items()):
                self.now += storage.nbytes() - self.sizes[where]
                self.sizes[where] = storage.nbytes()
            self.peak = max(self.peak, self.now)

    def watch(self, tensor: Tensor) -> None:
        """Count the tensor's storage, and its gradient's, unless they are known."""
        if is_traceable_wrapper_subclass(tensor) or tensor.is_sparse:
            return  # its parts are tensors of their own
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return  # of a torch.vmap that is over
        storage = tensor.untyped_storage()
        if storage.device.type == "meta" or storage.nbytes() == 0:
            return
        where, size = storage._cdata, storage.nbytes()
        if where not in self.sizes:
            self.sizes[where] = size
            self.storages[where] = storage
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.release, where).atexit = False
        if tensor.is_leaf and tensor.grad is not None:
            self.watch(tensor.grad)

    def release(self, where: int) -> None:
        self.now -= self.sizes.pop(where)


def is_wrapper(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


def peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes of tensors alive at once while `step` runs."""
    gc.collect()
    with torch.no_grad(), LiveBytes(resizing=True) as live, torch.enable_grad():
        step()
    return live.peak


def peak_allocated(step: Callable[[], object]) -> int:
    """The same as torch's allocator of the CPU tells it, of compiled code too, whose
    tensors no mode sees made."""
    gc.collect()
    with torch.no_grad(), LiveBytes() as before:
        pass
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = seen.profiler.kineto_results.events()
    told = [event for event in events if event.name() == "[memory]"]
    told.sort(key=lambda event: event.start_ns())
    return before.now + max(accumulate((e.nbytes() for e in told), initial=0))
