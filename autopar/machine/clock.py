"""The clock by which ops are timed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds of this thread, if it does all of the work; else on the wall."""
    if device.type == "cpu":
        alone = torch.get_num_threads() == 1
        return time.thread_time if alone else time.perf_counter

    def after_kernels() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return after_kernels
