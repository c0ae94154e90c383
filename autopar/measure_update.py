"""Seconds of an optimizer's step: AdamW, as `autopar run` makes it, on one rank."""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor

from autopar.measure_ops import clock_of
from passes.measured import Update

# Many small tensors say what each takes; few large ones, beyond caches, what bytes do.
SMALL, LARGE = (96, 1 << 10), (4, 1 << 22)  # tensors, elements of each
REPEATS = 5


def measure_update(device: torch.device) -> Update:
    """The line through both: seconds of a tensor, and of a byte of parameters."""
    (n, few), (m, many) = SMALL, LARGE
    small, large = _seconds(n, few, device), _seconds(m, many, device)
    per_tensor = max(0.0, small / n)
    # What small tensors take is starting their ops, all but a little.
    per_byte = max(0.0, large - m * per_tensor) / (4 * m * many)
    return Update(per_tensor, per_byte)


def _seconds(tensors: int, elements: int, device: torch.device) -> float:
    """Of one step, gradients cleared before it as the executor does."""
    flat = torch.zeros(tensors * elements, device=device)
    held = [torch.zeros(elements, device=device) for _ in range(tensors)]
    parameters = [torch.nn.Parameter(x) for x in held]
    for p, grad in zip(parameters, flat.split(elements), strict=True):
        p.grad = grad
    optimizer, clock = torch.optim.AdamW(parameters), clock_of(device)
    optimizer.step()  # makes its state
    times = []
    for _ in range(REPEATS):
        begin = clock()
        _clear(flat, elements)
        optimizer.step()
        times.append(clock() - begin)
    return median(times)


def _clear(flat: Tensor, elements: int) -> None:
    for grad in flat.split(elements):
        grad.zero_()
    flat.zero_()
