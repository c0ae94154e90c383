"""Fake tensors in place of a model's own, which have no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..forward.on_meta import META, Shapes


def device_of(model: nn.Module) -> torch.device:
    """The device that a model is traced on: the CPU, for parameters on meta."""
    real = (p.device for p in model.parameters() if not p.is_meta)
    return next(real, torch.device("cpu"))


@contextlib.contextmanager
def on_fake_tensors(
    wrapper: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    always: bool = False,
) -> Iterator[dict[str, torch.Tensor]]:
    """Example inputs to export with; meta parameters (or `always` all of them) become
    fake ones meanwhile, or ones of the meta device, which run faster.

    Inputs are copied: to where the model is, and because export merges two inputs that
    are one tensor.
    """
    own = (t for m in wrapper.modules() for t in _own_tensors(m).values())
    if not always and not any(t.is_meta for t in own):
        yield {k: v.detach().to(device, copy=True) for k, v in tensors.items()}
        return
    is_meta = device == META
    mode = Shapes() if is_meta else FakeTensorMode(allow_non_fake_inputs=True)
    saved: list[tuple[dict, str, torch.Tensor]] = []
    replaced: dict[int, torch.Tensor] = {}
    for module in wrapper.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None:
                    continue
                if id(old) not in replaced:
                    with mode:
                        replaced[id(old)] = _fake_like(old, device)
                saved.append((table, name, old))
                table[name] = replaced[id(old)]
    try:
        with mode, device if is_meta else contextlib.nullcontext():
            yield {
                k: torch.empty(v.shape, dtype=v.dtype, device=device)
                for k, v in tensors.items()
            }
    finally:
        for table, name, old in saved:
            table[name] = old


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    both = {**module._parameters, **module._buffers}
    return {k: v for k, v in both.items() if v is not None}


def _fake_like(old: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor or parameter of the same shape, made in a mode of fake tensors."""
    is_param = isinstance(old, nn.Parameter)
    wants = is_param and old.requires_grad
    new = torch.empty(old.shape, dtype=old.dtype, device=device, requires_grad=wants)
    if is_param:  # as `nn.Parameter` says it, which would make another one
        setattr(new, "_is_param", True)  # noqa: B010
    return new
