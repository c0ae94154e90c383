"""Batches in which nothing is degenerate, to prove programs with.

Every token and every class occurs where there is room, some labels are left out and
some keys hidden, in each sample others; and nothing is in all batches that are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Generator, Tensor

from autopar.passes.capture.rows.input_ranges import (
    DOCUMENT,
    INDEX,
    LABEL,
    MASK,
    InputRange,
)
from autopar.proof.chance import dtype_of, generator_of, uniform

Spec = tuple[tuple[int, ...], "torch.dtype | str"]  # shape and dtype

NONE_DRAWN: Mapping[str, Tensor] = {}
LEAST = 0.05  # of normal numbers, the smallest
DOCUMENTS = 4  # in a row of a sequence, about
HOLES = 0.3  # the share of labels left out, and of keys hidden


def draw_batch(
    inputs: Mapping[str, Spec],
    ranges: Mapping[str, InputRange],
    seed: int,
    like: Mapping[str, Tensor] = NONE_DRAWN,
    gentle: bool = True,
) -> dict[str, Tensor]:
    """Draws a batch that a model can be run on.

    inputs: field -> (shape, dtype). ranges: what integers may be, as found in the
    graph. like: an example, for fields of which the graph does not tell; of the same
    shapes or not. gentle: no sample without labels, and no query that sees nothing, of
    which some models make no finite numbers.
    """
    batch = {}
    for name, (shape, kind) in inputs.items():
        generator, dtype = generator_of(seed, name), dtype_of(kind)
        known, example = ranges.get(name), like.get(name)
        if dtype.is_floating_point:
            made = _draw_floats(shape, generator, example, seed)
        elif known is not None and known.role in (INDEX, LABEL):
            made = draw_rows(shape, known.low, known.high, generator)
            if known.holes:
                made = make_holes(made, known.holes, generator, seed, gentle)
        elif known is not None and known.role == DOCUMENT:
            made = draw_documents(shape, generator)
        elif _is_mask(dtype, known, example):
            made = draw_mask(shape, generator, _seen(example), seed, gentle)
        else:
            made = _keep(shape, example)
        batch[name] = made.to(dtype)
    return batch


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


def draw_documents(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Draws ids of documents, some four runs of a few ids in each row, of which one may
    come again: int64."""
    begins = uniform(shape, generator) < DOCUMENTS / max(1, shape[-1] if shape else 1)
    ids = draw_rows(shape, 0, 3, generator)
    places = torch.arange(shape[-1] if shape else 1).expand(shape)
    last = torch.where(begins, places, 0)
    return ids.gather(-1, last.cummax(-1).values) if shape else ids


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
    row and without: one count must not stand for another. Of one of the last two
    samples a single one, so that no two shares of it, on however many ranks, are alike.
    """
    if not labels.ndim:
        return labels
    shape, samples = tuple(labels.shape), labels.shape[0]
    share = HOLES * 2 * draw_rows((samples,), 0, samples, generator) / max(1, samples)
    share = share.reshape(-1, *[1] * (labels.ndim - 1))
    hidden = uniform(shape, generator) < share
    free = ~_one_of_each_row(shape, generator, first=1)
    hidden &= free
    emptied = int(torch.randint(max(1, samples), (), generator=generator))
    if not gentle and samples >= 4 and labels.ndim > 1:
        hidden[emptied], free[emptied] = True, False
    if samples > 1 and labels.ndim > 1:
        single = samples - 1 if bool(free[-1].any()) else samples - 2
        places = free[single].clone()
        places[..., 0] = False
        if bool(places.any()):
            hidden[single] = False
            hidden[single].view(-1)[int(places.int().argmax())] = True
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
    hidden = _of_parity((uniform(shape, generator) < HOLES) & free, free, seed)
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
    """The hidden ones: an even number for an even seed, else an odd, with those that
    begin a row and without them, where there is room among those that are free."""
    hidden = hidden.clone()
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
    """Which of 0 and 1 an example shows: where rows begin, if padding follows, or where
    they end, if it comes first; in doubt 1."""
    if example is None or not example.ndim:
        return 1
    rows = example.detach().reshape(-1, example.shape[-1]).double()
    ends = {end.mean().item() for end in (rows[:, 0], rows[:, -1])}
    return 0 if ends & {0.0} and not ends & {1.0} else 1


def _keep(shape: tuple[int, ...], example: Tensor | None) -> Tensor:
    """Draws integers of an unknown meaning: positions, or as in the example."""
    if example is not None and tuple(example.shape) == shape:
        return example.detach().cpu().clone()
    return torch.arange(shape[-1] if shape else 1).expand(shape or (1,)).reshape(shape)


def _draw_floats(
    shape: tuple[int, ...], generator: Generator, example: Tensor | None, seed: int
) -> Tensor:
    """Draws floats like the example's: 0 and 1, shares of 1, positive ones, or any; an
    example that masks by infinities is kept."""
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
