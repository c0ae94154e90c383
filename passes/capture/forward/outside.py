"""Tensors that a forward or a loss function reads though they are no parameters or
buffers of the model, nor in the batch: their values are part of what is compiled.

One that wants a gradient would never have it, and one that changes would go on counting
as it was: the first is refused, the second is told by who runs the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import AutoparError, CaptureError
from ...nested import tensors
from ..forward.user_frames import at_work

SAMPLE = 16  # elements of a tensor that are looked at
# What tells how a tensor is made, and nothing of its values.
DESCRIBE = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement),
        *(Tensor.stride, Tensor.is_contiguous, Tensor.get_device),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size),
        *(Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__),
        *(Tensor.ndim.__get__, Tensor.requires_grad.__get__),
    )
)


@dataclass
class Outside:
    """A tensor, as it was when it was captured, and where it is read."""

    x: Tensor
    source: str

    def __post_init__(self) -> None:
        self.version, self.sample = self.x._version, sample(self.x)

    def changed(self, thorough: bool) -> bool:
        """Whether the tensor was written to since; thorough: also through `.data`, as
        far as a few of its elements tell."""
        if self.x._version != self.version:
            return True
        return thorough and not torch.equal(sample(self.x), self.sample)

    def refuse(self) -> None:
        """Raises AutoparError: it has changed."""
        shape = tuple(self.x.shape)
        raise AutoparError(
            f"a tensor of shape {shape} has changed since the step was compiled with "
            "its values: it is no parameter of the model, and not in the batch",
            source=self.source,
            fix="pass it in the batch, or what is computed with it, as by a teacher "
            "whose weights move, before each step",
        )


def sample(x: Tensor) -> Tensor:
    """Copies some elements, also within a capture."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        flat = x.detach().flatten()
        return flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].clone()


_READ: ContextVar[dict[int, Outside] | None] = ContextVar("outside", default=None)


@contextmanager
def outside_tensors() -> Iterator[dict[int, Outside]]:
    """Collects the tensors from outside that captures within read."""
    read: dict[int, Outside] = {}
    token = _READ.set(read)
    try:
        yield read
    finally:
        _READ.reset(token)


def note_outside(names: dict[int, str], func: Any, args: Any, result: Any) -> None:
    """Notes the tensors outside that a call reads.

    names: of the model's parameters, by their ids: while it is captured the model has
    others in their place. Raises: CaptureError, where one of them wants a gradient.
    """
    for x in () if func in DESCRIBE else map(_unwrapped, tensors(args)):
        if type(x) not in (Tensor, nn.Parameter) or x.is_meta:
            continue  # of the capture
        if x.requires_grad and any(r.requires_grad for r in _floating(result)):
            raise _wants_gradient(x, names.get(id(x)))
        if (read := _READ.get()) is not None and id(x) not in read:
            read[id(x)] = Outside(x, at_work())


def _unwrapped(x: Tensor) -> Tensor:
    """The tensor that a transform of torch.func, as vmap, has wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def _floating(result: Any) -> Iterable[Tensor]:
    return (r for r in tensors(result) if r.is_floating_point() or r.is_complex())


def _wants_gradient(x: Tensor, name: str | None) -> CaptureError:
    if name is not None:
        return CaptureError(
            f"the parameter '{name}' is read by a reference of its own, not as an "
            "attribute of the model, so that a graph of the model does not know it",
            source=at_work(),
            fix=f"read it as model.{name} where it is used",
        )
    if not x.is_leaf:
        return CaptureError(
            f"a tensor of shape {tuple(x.shape)} that lasts from step to step has been "
            "written to by what wants a gradient, which it has in one step alone",
            source=at_work(),
            fix="let forward write into a tensor that it makes, or read what it would "
            "write: a cache of keys and values is for generating",
        )
    return CaptureError(
        f"a tensor of shape {tuple(x.shape)} wants a gradient, but is no parameter of "
        "the model: it would stay as it is",
        source=at_work(),
        fix="make it an attribute of the model, as an nn.Parameter or in a module that "
        "holds it; or read x.detach() where it is not to be trained",
    )
