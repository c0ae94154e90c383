"""Weights in which nothing is degenerate, to prove programs with.

A program that forgets a bias is right as long as biases are 0. So no weight drawn here
is 0 or 1, and no two of a vector are equal. All is drawn from a seed and the tensor's
own name: other tensors, their order and the plan do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Generator, Tensor

from autopar.proof.chance import dtype_of, generator_of, signs, uniform
from autopar.proof.draw_batches import LEAST, NONE_DRAWN, Spec, draw_batch

__all__ = ["draw_batch", "draw_buffers", "draw_parameters", "draw_tensor"]

BIAS = (0.1, 0.5)  # between which the sizes of biases lie
FACTOR = (0.1, 0.4)  # and how far norms' weights are from 1


def draw_parameters(
    specs: Mapping[str, Spec], seed: int, like: Mapping[str, Tensor] = NONE_DRAWN
) -> dict[str, Tensor]:
    """Draws a value for each parameter, on the CPU.

    specs: name -> (shape, dtype). like: real initial values, by name, of all or some:
    what their values tell (all positive, about a mean that is not 0) is kept, as for
    the decay rates of a state space. Tensors that are no floats are taken from `like`.
    """
    drawn = {}
    for name, (shape, kind) in specs.items():
        dtype, initial = dtype_of(kind), like.get(name)
        if initial is not None and (initial.is_meta or not initial.numel()):
            initial = None
        if not (dtype.is_floating_point or dtype.is_complex):
            drawn[name] = (
                torch.zeros(shape, dtype=dtype) if initial is None else initial
            )
            continue
        generator = generator_of(seed, name)
        if initial is not None:
            made = draw_near(initial.detach().cpu(), generator)
        elif len(shape) == 1 and name.rpartition(".")[2] in ("weight", "scale"):
            made = 1.0 + draw_tensor(shape, torch.float64, generator, FACTOR)
        else:
            made = draw_tensor(shape, dtype, generator)
        drawn[name] = made.to(dtype)
    return drawn


def draw_buffers(initial: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Draws those buffers that are 0 everywhere, or 1: statistics, biases of routers.
    Others hold what the model needs (tables, masks) and stay."""
    buffers = {}
    for name, x in initial.items():
        if x.is_meta or not x.is_floating_point() or x.numel() < 2:
            continue
        if bool((x == 0).all()) or bool((x == 1).all()):
            drawn = draw_near(x.detach().cpu(), generator_of(seed, name))
            buffers[name] = drawn.to(x)
    return buffers


def draw_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: Generator,
    sizes: tuple[float, float] = BIAS,
) -> Tensor:
    """Draws a tensor of both signs without 0 and 1, as initial weights are.

    A vector or a number: of absolute values between `sizes`, no two of them equal. A
    matrix or more: normal, by 1 / sqrt(columns), so that products keep their size; of
    several matrices (experts) by the greater of rows and columns.
    """
    if dtype.is_complex:
        parts = draw_tensor((*shape, 2), torch.float64, generator, sizes)
        return torch.view_as_complex(parts).to(dtype)
    if len(shape) < 2:
        count = prod(shape)
        order = torch.randperm(count, generator=generator).double()
        within = (order + uniform((count,), generator)) / max(1, count)
        low, high = sizes
        return (signs((count,), generator) * (low + (high - low) * within)).reshape(
            shape
        )
    size = max(1, max(shape[-2:]) if len(shape) > 2 else shape[-1]) ** -0.5
    x = torch.randn(shape, generator=generator)
    return ((x + torch.where(x < 0, -LEAST, LEAST)) * size).to(dtype)


def draw_near(initial: Tensor, generator: Generator) -> Tensor:
    """Draws what could be the initial value of a parameter that begins as `initial`.

    Values of one sign keep it, moved by a tenth to four tenths; those about a mean that
    is far from 0 are moved by three tenths of their deviation. Others are drawn anew:
    an initial value near 0 (a bias, a branch that begins closed) says nothing.
    """
    shape = tuple(initial.shape)
    if initial.is_complex():
        return draw_tensor(shape, initial.dtype, generator)
    x = initial.double()
    if bool((x > 0).all()) or bool((x < 0).all()):
        if x.ndim < 2:
            moved = draw_tensor(shape, torch.float64, generator, FACTOR)
        else:
            low, high = FACTOR
            moved = low + (high - low) * uniform(shape, generator)
            moved = moved * signs(shape, generator)
        return x * (1.0 + moved)
    deviation = x.std(correction=0).item()
    if x.mean().abs().item() > deviation:
        return x + 0.3 * deviation * torch.randn(shape, generator=generator)
    return draw_tensor(shape, torch.float64, generator)
