"""float32 products by TF32 tensor cores, for as long as a step computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def in_tf32(wanted: bool) -> Iterator[None]:
    """Let GPUs multiply float32 in TF32 (8 bits of exponent, 10 of mantissa), and put
    torch's settings back after it.

    They are of the process: other threads see them meanwhile. Without `wanted`, and
    where the user has turned TF32 on, all stays as it is.
    """
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = cuda.fp32_precision, cpu.fp32_precision
    if not wanted or before[0] == "tf32":
        yield
        return
    # Setting `fp32_precision` alone would do, but then Inductor, which still reads the
    # older setting too, is told that they contradict each other.
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        cuda.fp32_precision, cpu.fp32_precision = before
