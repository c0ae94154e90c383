"""A model with drawn weights for a while, and a drawn batch for its program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.passes.program import Program
from autopar.proof.draw_batches import NONE_DRAWN, draw_batch
from autopar.proof.draw_values import draw_parameters


@contextmanager
def drawn_weights(
    model: nn.Module, seed: int, buffers: Mapping[str, Tensor] = NONE_DRAWN
) -> Iterator[None]:
    """Gives every parameter a drawn value; afterwards each has its own again. buffers:
    values of some, for as long."""
    own = {name: p.data for name, p in model.named_parameters()}
    specs = {name: (tuple(x.shape), x.dtype) for name, x in own.items()}
    drawn = draw_parameters(specs, seed, own)
    placed = {name: x.to(own[name].device) for name, x in drawn.items()}
    with with_values(model, {**placed, **buffers}):
        yield


@contextmanager
def with_values(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Gives parameters and buffers these values; afterwards each has its own again."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {name: x.data for name, x in named.items() if name in values}
    try:
        for name in own:
            named[name].data = values[name]
        yield
    finally:
        for name, x in own.items():
            named[name].data = x


def drawn_batch(
    program: Program, batch: Mapping[str, Any], seed: int, gentle: bool = True
) -> dict[str, Any]:
    """Draws every field that the program takes; others stay as they are. gentle: see
    `autopar.proof.draw_values.draw_batch`."""
    like = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
    inputs = {k: v for k, v in program.inputs.items() if k in like}
    drawn = draw_batch(inputs, program.ranges, seed, like, gentle=gentle)
    return {**batch, **{k: x.to(like[k].device) for k, x in drawn.items()}}


def is_finite(loss: Tensor, gradients: Mapping[str, Tensor]) -> bool:
    """Whether a model can be compared with on what was drawn for it."""
    return all(bool(torch.isfinite(x).all()) for x in (loss, *gradients.values()))
