"""Parameters on the host: what an optimizer updates, and where it keeps its state.

The device holds copies to compute with. They are made anew before each step, and its
gradients go the other way after it (the idea of ZeRO-Offload, Ren 2021,
arXiv:2101.06840, without its overlap). It is slow: a step costs the way there and back
over the bus, and an update the arithmetic of a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autopar.runtime.parameters.changed import check_data, kind_of


class Host:
    """CPU parameters beside those of a device, by the same names.

    parameters: for an optimizer. Reading and writing them, and their `.grad`, means the
    same as with parameters on the device.
    """

    def __init__(self, device: Mapping[str, nn.Parameter]) -> None:
        self._device = dict(device)
        self.parameters = {
            name: nn.Parameter(_beside(p).copy_(p.detach()), p.requires_grad)
            for name, p in device.items()
        }
        self._kinds = {n: kind_of(p) for n, p in self.parameters.items()}
        self.grads = {n: _beside(p) for n, p in device.items() if p.requires_grad}

    def check(self) -> None:
        """Raises ParameterError for a parameter that was given other data than it had
        the like of."""
        for name, p in self.parameters.items():
            check_data(name, p, self._kinds[name])

    @torch.no_grad()
    def upload(self) -> None:
        """Bring the device's copies up to date, and the gradients to be added to."""
        for name, p in self.parameters.items():
            copy = self._device[name]
            copy.copy_(p)
            copy.grad = None if p.grad is None else p.grad.to(copy.device)

    @torch.no_grad()
    def download(self) -> None:
        """Fetch the gradients; those to be added to in the next step are the host's."""
        for name, grad in self.grads.items():
            copy = self._device[name]
            if not self.parameters[name].requires_grad:
                copy.grad = None  # frozen since: the host's stays as it is
                continue
            if copy.grad is None:  # it overflowed
                self.parameters[name].grad = None
                continue
            self.parameters[name].grad = grad.copy_(copy.grad)
            copy.grad = None


def _beside(p: Tensor) -> Tensor:
    """Room on the host for a tensor, which a GPU can read and write directly."""
    pinned = p.device.type == "cuda"
    return torch.empty(p.shape, dtype=p.dtype, device="cpu", pin_memory=pinned)
