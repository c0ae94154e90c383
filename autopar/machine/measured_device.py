"""Measures a GPU that is in no table: large products and a large copy, timed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from autopar.machine.clock import clock_of
from autopar.passes.price.cluster import TF32, Device

# Of products, wide enough that launching is nothing; and bytes of a copy.
WIDTH, COPIED = 4096, 2**28
TIMES = 5
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def measure_device(
    name: str,
    memory: float,
    device: torch.device,
    width: int = WIDTH,
    copied: int = COPIED,
    dispatch: float = 0.0,
) -> Device:
    """A device as it is measured, in a second or two.

    memory: bytes. width: of square products. copied: bytes. dispatch: seconds of the
    host for each op. Peaks are what products reach, so efficiencies are 1. A GPU's
    functions are compiled, see `autopar.machine.backend`.
    """
    flops = {
        str(dtype).removeprefix("torch."): 2 * width**3 / _product(width, dtype, device)
        for dtype in DTYPES
    }
    if device.type == "cuda":
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            flops[TF32] = 2 * width**3 / _product(width, torch.float32, device)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
    x = torch.ones(copied, dtype=torch.uint8, device=device)
    # A copy reads and writes.
    bandwidth = 2 * copied / _seconds(lambda: x.clone(), device)
    fused = device.type == "cuda"
    return Device(
        name, memory, bandwidth, flops, 1.0, 1.0, fused=fused, dispatch=dispatch
    )


def _product(width: int, dtype: torch.dtype, device: torch.device) -> float:
    x = torch.ones(width, width, dtype=dtype, device=device)
    return _seconds(lambda: x @ x, device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    clock, times = clock_of(device), []
    run()  # allocates, and chooses a kernel
    for _ in range(TIMES):
        begin = clock()
        run()
        times.append(clock() - begin)
    return median(times)
