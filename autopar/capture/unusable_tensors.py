"""Tensors of a model that no training can begin with: those that are not there yet,
and parameters that are tied by their memory alone, as by `a.data = b.data`."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autopar.passes.errors import CaptureError


def refuse_unusable(model: nn.Module) -> None:
    """Raises CaptureError for a tensor that a lazy module has not made yet, or that was
    made under `torch.inference_mode()`; see also `refuse_shared_memory`."""
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(x):
            raise CaptureError(
                f"'{name}' has no shape yet: a lazy module makes it when it is called",
                fix="call the model once before it is compiled: model(**batch)",
            )
        if x.is_inference():
            raise CaptureError(
                f"'{name}' was made under torch.inference_mode(), and no derivative "
                "may be taken of what it is in",
                fix="make and load the model outside of it, or under torch.no_grad()",
            )
    refuse_shared_memory(model)


def refuse_shared_memory(model: nn.Module) -> None:
    """Raises CaptureError for two parameters in the same memory.

    An optimizer updates each of them, and so what they share twice; ranks have parts of
    each, which would not be the same after the first update. One parameter with two
    names is one, whatever its memory.
    """
    held = [(span(p), name, p) for name, p in model.named_parameters()]
    placed = [(place, name, p) for place, name, p in held if place is not None]
    placed.sort(key=lambda entry: entry[0])
    for (before, name, one), (after, other, two) in pairwise(placed):
        if after[0] < before[1] and (one.requires_grad or two.requires_grad):
            raise CaptureError(
                f"parameters '{name}' and '{other}' are two, in the same memory",
                fix=f"tie them as one: {owner(other)} = {owner(name)}, without .data",
            )


def owner(name: str) -> str:
    """h.0.weight as it is written in Python: model.h[0].weight."""
    parts = [f"[{p}]" if p.isdigit() else f".{p}" for p in name.split(".")]
    return "model" + "".join(parts)


def span(x: Tensor) -> tuple[int, int] | None:
    """First byte and the one after the last, of what lies without gaps; None of what
    does not, or has no memory."""
    if x.is_meta or x.numel() == 0 or x.layout != x.new_empty(0).layout:
        return None
    steps = ((n - 1) * step for n, step in zip(x.shape, Tensor.stride(x), strict=True))
    elements = 1 + sum(steps)
    if elements != x.numel():
        return None
    return x.data_ptr(), x.data_ptr() + elements * x.element_size()
