"""Weights and batches in which nothing is degenerate, to prove programs with.

A program that forgets a bias is right as long as biases are 0, and one that takes the
mask of another rank as long as it hides nothing. So no weight drawn here is 0 or 1, no
two of a vector are equal, every token and every class occurs where there is room, some
labels are left out and some keys hidden, in each sample others.

All is drawn from a seed and the tensor's own name: other tensors, their order and the
plan do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from zlib import crc32

import torch
from torch import Generator, Tensor

from passes.proof.input_ranges import INDEX, LABEL, MASK, InputRange

Spec = tuple[tuple[int, ...], "torch.dtype | str"]  # shape and dtype

NONE_DRAWN: Mapping[str, Tensor] = {}
BIAS = (0.1, 0.5)  # between which the sizes of biases lie
FACTOR = (0.1, 0.4)  # and how far norms' weights are from 1
LEAST = 0.05  # of a matrix, the smallest element over its standard deviation
HOLES = 0.3  # the share of labels left out, and of keys hidden


def draw_parameters(
    specs: Mapping[str, Spec], seed: int, like: Mapping[str, Tensor] = NONE_DRAWN
) -> dict[str, Tensor]:
    """Draws a value for each parameter, on the CPU.

    specs: name -> (shape, dtype). like: real initial values, by name, of all or some:
    what their values tell (all positive, about a mean that is not 0) is kept, as for
    the decay rates of a state space. Tensors that are no floats are taken from `like`.
    """
    found = {}
    for name, (shape, kind) in specs.items():
        dtype, given = dtype_of(kind), like.get(name)
        if given is not None and (given.is_meta or not given.numel()):
            given = None
        if not (dtype.is_floating_point or dtype.is_complex):
            found[name] = torch.zeros(shape, dtype=dtype) if given is None else given
            continue
        generator = _generator(seed, name)
        if given is not None:
            made = draw_near(given.detach().cpu(), generator)
        elif len(shape) == 1 and name.rpartition(".")[2] in ("weight", "scale"):
            made = 1.0 + draw_tensor(shape, torch.float64, generator, FACTOR)
        else:
            made = draw_tensor(shape, dtype, generator)
        found[name] = made.to(dtype)
    return found


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
        within = (order + _uniform((count,), generator)) / max(1, count)
        low, high = sizes
        return (_signs((count,), generator) * (low + (high - low) * within)).reshape(
            shape
        )
    size = max(1, max(shape[-2:]) if len(shape) > 2 else shape[-1]) ** -0.5
    x = torch.randn(shape, generator=generator)
    return ((x + torch.where(x < 0, -LEAST, LEAST)) * size).to(dtype)


def draw_near(given: Tensor, generator: Generator) -> Tensor:
    """Draws what could be the initial value of a parameter that begins as `given`.

    Values of one sign keep it, moved by a tenth to four tenths; those about a mean that
    is far from 0 are moved by three tenths of their deviation. Others are drawn anew:
    an initial value near 0 (a bias, a branch that begins closed) says nothing.
    """
    shape = tuple(given.shape)
    if given.is_complex():
        return draw_tensor(shape, given.dtype, generator)
    x = given.double()
    if bool((x > 0).all()) or bool((x < 0).all()):
        if x.ndim < 2:
            moved = draw_tensor(shape, torch.float64, generator, FACTOR)
        else:
            low, high = FACTOR
            moved = low + (high - low) * _uniform(shape, generator)
            moved = moved * _signs(shape, generator)
        return x * (1.0 + moved)
    deviation = x.std(correction=0).item()
    if x.mean().abs().item() > deviation:
        return x + 0.3 * deviation * torch.randn(shape, generator=generator)
    return draw_tensor(shape, torch.float64, generator)


# --- batches ------------------------------------------------------------------------


def draw_batch(
    inputs: Mapping[str, Spec],
    ranges: Mapping[str, InputRange],
    seed: int,
    like: Mapping[str, Tensor] = NONE_DRAWN,
    limits: Mapping[str, int] | None = None,
    gentle: bool = True,
) -> dict[str, Tensor]:
    """Draws a batch that a model can be run on.

    inputs: field -> (shape, dtype). ranges: what integers may be, as found in the
    graph. like: an example, for fields of which the graph does not tell; of the same
    shapes or not. limits: field -> one after the highest, where that is known to be
    lower than the graph's. gentle: no sample without labels, and no query that sees
    nothing, of which some models make no finite numbers.
    """
    found = {}
    for name, (shape, kind) in inputs.items():
        generator, dtype = _generator(seed, name), dtype_of(kind)
        known, example = ranges.get(name), like.get(name)
        if dtype.is_floating_point:
            made = _draw_floats(shape, generator, example, seed)
        elif known is not None and known.role in (INDEX, LABEL):
            high = min(known.high, (limits or {}).get(name, known.high))
            made = draw_rows(shape, known.low, high, generator)
            if known.holes:
                made = make_holes(made, known.holes, generator, seed, gentle)
        elif _is_mask(dtype, known, example):
            made = draw_mask(shape, generator, _seen(example), seed, gentle)
        else:
            made = _keep(shape, example)
        found[name] = made.to(dtype)
    return found


def draw_rows(
    shape: tuple[int, ...], low: int, high: int, generator: Generator
) -> Tensor:
    """Draws integers from low to high - 1, each as often as every other (give or take
    one), in any order: int64."""
    count, choices = prod(shape), max(1, high - low)
    rounds = [
        torch.randperm(choices, generator=generator)
        for _ in range(-(-count // choices))
    ]
    drawn = torch.cat(rounds)[:count] if rounds else torch.zeros(0, dtype=torch.int64)
    return (low + drawn[torch.randperm(count, generator=generator)]).reshape(shape)


def make_holes(
    labels: Tensor,
    holes: tuple[int, ...],
    generator: Generator,
    seed: int = 0,
    gentle: bool = True,
) -> Tensor:
    """Leaves labels out, in each sample another share, and of one of four samples all;
    gentle: none of which nothing is left, as a loss may divide by how many there are.

    Draws of consecutive seeds leave out other numbers of them, with those that begin a
    row and without: one count must not stand for another.
    """
    if not labels.ndim:
        return labels
    shape, samples = tuple(labels.shape), labels.shape[0]
    share = HOLES * 2 * draw_rows((samples,), 0, samples, generator) / max(1, samples)
    share = share.reshape(-1, *[1] * (labels.ndim - 1))
    hidden = _uniform(shape, generator) < share
    free = ~_one_of_each_row(shape, generator, first=1)
    emptied = int(torch.randint(max(1, samples), (), generator=generator))
    if not gentle and samples >= 4 and labels.ndim > 1:
        hidden[emptied], free[emptied] = True, False
        hidden = _of_parity(hidden, free, seed)
        hidden[emptied] = True
    else:
        hidden = _of_parity(hidden, free, seed)
    which = draw_rows(shape, 0, len(holes), generator)
    return torch.where(hidden, torch.tensor(holes)[which], labels)


def draw_mask(
    shape: tuple[int, ...],
    generator: Generator,
    seen: int = 1,
    seed: int = 0,
    gentle: bool = True,
) -> Tensor:
    """Draws int64 of 0 and 1, of which `seen` is what can be seen: most, and at least
    one of each row; gentle: the first too, which may be all that a first query sees.
    Of consecutive seeds, other numbers of them."""
    free = ~_one_of_each_row(shape, generator)
    if gentle and shape:
        free[..., 0] = False
    hidden = _of_parity(_uniform(shape, generator) < HOLES, free, seed)
    return torch.where(hidden, 1 - seen, seen)


def _one_of_each_row(
    shape: tuple[int, ...], generator: Generator, first: int = 0
) -> Tensor:
    """True in one place of each row, not before `first` where there is another."""
    if not shape:
        return torch.ones((), dtype=torch.bool)
    columns = shape[-1]
    low = min(first, columns - 1) if len(shape) > 1 else 0
    which = torch.randint(low, max(1, columns), (*shape[:-1], 1), generator=generator)
    return torch.arange(columns) == which


def _of_parity(hidden: Tensor, free: Tensor, seed: int) -> Tensor:
    """Those of `hidden` that are free: an even number for an even seed, else an odd,
    with those that begin a row and without them, where there is room."""
    hidden = hidden & free
    first = torch.zeros_like(hidden)
    if hidden.ndim > 1:
        first[..., 0] = True
    for part, odd in ((first, 0), (~first, seed % 2)):
        places = (free & part).flatten()
        if int((hidden & part).sum()) % 2 != odd and bool(places.any()):
            hidden.view(-1)[int(places.int().argmax())] ^= True
    return hidden


def _is_mask(
    dtype: torch.dtype, known: InputRange | None, example: Tensor | None
) -> bool:
    if dtype is torch.bool:
        return True
    if example is not None:
        return bool(((example == 0) | (example == 1)).all())
    return known is not None and known.role == MASK


def _seen(example: Tensor | None) -> int:
    """Which of 0 and 1 is more often in an example."""
    return 1 if example is None else int(example.double().mean().item() >= 0.5)


def _keep(shape: tuple[int, ...], example: Tensor | None) -> Tensor:
    """What integers of an unknown meaning are: positions, or as in the example."""
    if example is not None and tuple(example.shape) == shape:
        return example.detach().cpu().clone()
    return torch.arange(shape[-1] if shape else 1).expand(shape or (1,)).reshape(shape)


def _draw_floats(
    shape: tuple[int, ...], generator: Generator, example: Tensor | None, seed: int
) -> Tensor:
    """Draws floats as the example's: 0 and 1, shares of 1, positive ones, any; but what
    hides by infinities is kept as it is."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = x + torch.where(x < 0, -LEAST, LEAST)
    if example is None or not example.numel():
        return x
    like = example.detach().cpu().double()
    if bool(((like == 0) | (like == 1)).all()):
        return draw_mask(shape, generator, _seen(example), seed).double()
    if not bool(like.isfinite().all()) or like.min().item() < -1e4:
        return like.clone() if tuple(like.shape) == shape else torch.zeros(shape)
    if bool((like >= 0).all()):
        sums = like.sum(-1) if like.ndim else like
        if like.ndim and bool((sums - 1.0).abs().max() < 1e-4):
            return x.softmax(-1)
        if bool((like <= 1).all()):
            return (0.05 + 0.9 * torch.sigmoid(x)).clamp(0.05, 0.95)
        return like.mean() * (0.5 + torch.sigmoid(x))
    return like.mean() + like.std(correction=0) * x


# --- chance -------------------------------------------------------------------------


def dtype_of(kind: torch.dtype | str) -> torch.dtype:
    """A dtype, or the one of that name."""
    return kind if isinstance(kind, torch.dtype) else getattr(torch, kind)


def _generator(seed: int, name: str) -> Generator:
    return Generator().manual_seed(crc32(f"{seed} {name}".encode()))  # of 32 bits


def _uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Between 0 and 1, float64."""
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _signs(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """1 and -1, float64."""
    return torch.where(_uniform(shape, generator) < 0.5, -1.0, 1.0).double()
