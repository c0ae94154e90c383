"""Seconds of an optimizer's step: AdamW, as `autopar run` makes it, on one rank."""

from __future__ import annotations

from statistics import median

import torch

from autopar.machine.clock import clock_of
from autopar.passes.price.measured import Point

# Bytes of a parameter, by powers of eight; the largest no longer fit into caches.
SIZES = tuple(1 << power for power in range(8, 27, 3))
MOST = 1 << 26  # bytes of all parameters of a size
MANY = 32  # parameters of a size, unless these are more
REPEATS = 5


def measure_update(device: torch.device) -> tuple[Point, ...]:
    """(bytes of a parameter, seconds of its update), by ascending bytes."""
    return tuple((float(size), _seconds(size, device)) for size in SIZES)


def _seconds(size: int, device: torch.device) -> float:
    """Times a parameter among others like it; gradients are cleared before the step, as
    the executor does."""
    count, elements = max(1, min(MANY, MOST // size)), size // 4
    flat = torch.full((count * elements,), 1e-3, device=device)
    draw = torch.Generator(device=device).manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(elements, generator=draw, device=device))
        for _ in range(count)
    ]
    grads = flat.split(elements)
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad
    optimizer, clock = torch.optim.AdamW(parameters), clock_of(device)
    optimizer.step()  # makes its state
    times = []
    for _ in range(REPEATS):
        begin = clock()
        for grad in grads:
            grad.zero_()
        flat.zero_()
        optimizer.step()
        times.append(clock() - begin)
        flat.fill_(1e-3)
    return median(times) / count
