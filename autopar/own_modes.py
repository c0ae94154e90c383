"""Modes of torch that a caller may be in, and that compiling and proving are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_modes() -> Iterator[None]:
    """Computes gradients and casts nothing, whatever modes surround it; a context or a
    decorator.

    A step compiles when it is called first, or with a batch of another shape, and that
    is often an evaluation, within `torch.no_grad()` or `torch.inference_mode()`: a
    program for it would have no backward, and tensors that no later step writes into.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield


@contextmanager
def on_cpu() -> Iterator[None]:
    """Puts tensors that name no device on the CPU, where proofs run, as a context or a
    decorator: `torch.set_default_device` is for what its caller makes."""
    if torch.get_default_device().type == "cpu":  # else each op takes longer
        yield
        return
    with torch.device("cpu"):
        yield
