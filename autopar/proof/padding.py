"""Whether batches can be padded: what a model computes of a short batch is what it
computes of a longer one, in which the loss leaves out what is more.

The model is captured for both, with few layers and rows, and both are run on the same
weights: loss, every gradient, and the scalars beside the loss must be the same. A loss
of labels, of which some are ignored, passes. One that is a mean over samples, or that
balances experts over all tokens, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.capture_model import capture_model
from autopar.local_batches import fields_of_samples
from autopar.own_modes import on_cpu
from autopar.passes.capture.rows.input_ranges import (
    LABEL,
    MASK,
    InputRange,
    find_input_ranges,
)
from autopar.passes.errors import BatchError
from autopar.passes.program import Program
from autopar.passes.proof.choose_sizes import choose_sizes
from autopar.passes.proof.find_extents import find_extents
from autopar.passes.proof.shrink import Shrinker
from autopar.passes.traced import Traced
from autopar.proof.chosen_layers import find_chosen_layers, with_few_layers
from autopar.proof.draw_values import draw_batch, draw_parameters
from autopar.proof.interpret import run_graph
from autopar.proof.values import real_values, values_of_buffers

# Rows and columns of the short batch, and how many more the longer one has. Extents as
# small are not changed where others are made small.
ROWS, COLUMNS = 2, 3
TOLERANCE = 1e-9
DRAWS = 2
LITTLE = 1e8  # parameters times elements of a batch, that are run as they are

Dims = Collection[tuple[str, int]]
"""(field, dim) of a batch: which of its dims are padded."""
Fills = Mapping[str, float]
"""Field of a batch -> with what it is padded; other fields repeat their last element.
"""


def pad(
    batch: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], fills: Fills
) -> dict[str, Any]:
    """A batch whose tensors have these shapes, which are no smaller than theirs."""
    padded = dict(batch)
    for name, shape in shapes.items():
        for dim, size in enumerate(shape):
            x, own = padded[name], padded[name].shape[dim]
            if size == own:
                continue
            places = torch.arange(size, device=x.device).clamp(max=own - 1)
            padded[name] = x.index_select(dim, places)
            if name in fills:
                padded[name].narrow(dim, own, size - own).fill_(fills[name])
    return padded


@on_cpu()
def find_fills(
    model: nn.Module,
    program: Program,
    batch: Mapping[str, Any],
    dims: Dims,
    loss_fn: Callable[..., Any] | None = None,
) -> Fills:
    """The values to pad batches like this one with along dims, with no effect.

    model: may have its weights on meta. batch: of zeros, with fields that are no
    tensors. Raises: BatchError, with the reason, where there would be an effect.
    """
    rows = {(name, 0) for name in fields_of_samples(batch, program.inputs)}
    probes = [_probe(batch, dims, rows, more) for more in (0, 1)]

    def capture() -> tuple[list[Traced], dict[str, Tensor]]:
        captured = [capture_model(model, probe, loss_fn) for probe in probes]
        return captured, {name: x.cpu() for name, x in real_values(model).items()}

    few = find_chosen_layers(model, program)
    _, (captured, like) = with_few_layers(model, program, few, capture, capture)
    (short, _), (longer, held) = (_small(traced, like) for traced in captured)
    if longer.graph.params != short.graph.params:
        raise BatchError("what it computes with depends on the batch's shape", fix=FIX)
    ranges, problem = find_input_ranges(longer.graph), NOTHING_LEFT_OUT
    for fills in _candidates(longer, ranges):
        difference = _first_difference(short, longer, ranges, held, fills)
        if difference is None:
            return fills
        names = ", ".join(f"'{name}' of {value:g}" for name, value in fills.items())
        problem = f"with {names} in what is padded, {difference}"
    raise BatchError(problem, fix=FIX)


FIX = (
    "leave it out, as DataLoader(drop_last=True) does, or let the loss leave samples "
    "out: labels of -100, as cross_entropy ignores them"
)
NOTHING_LEFT_OUT = "the loss has no labels that it ignores, and no mask"


def _probe(
    batch: Mapping[str, Any], dims: Dims, rows: Dims, more: int
) -> dict[str, Any]:
    """A batch with few rows or columns along these dims, `more` than the least."""
    probe = dict(batch)
    for name, x in batch.items():
        if isinstance(x, Tensor):
            shape = list(x.shape)
            for dim in range(x.ndim):
                if (name, dim) in dims:
                    few = ROWS if (name, dim) in rows else COLUMNS
                    shape[dim] = few + more
            probe[name] = torch.zeros(shape, dtype=x.dtype)
    return probe


def _small(
    traced: Traced, like: Mapping[str, Tensor]
) -> tuple[Traced, dict[str, Tensor]]:
    """The captured model, made small if it is large, with its buffers. Raises:
    NotShrunk."""
    graph = traced.graph
    size = max((prod(v.shape) for v in graph.inputs), default=1)
    if size * sum(prod(v.shape) for v in graph.params) > LITTLE:
        extents = find_extents(traced).united
        sizes = choose_sizes(extents.sizes, extents.sums, {}, {}, most=extents.most)
        shrinker = Shrinker(extents, sizes)
        traced = shrinker.graph(traced)
        known = {v.name for v in graph.buffers}
        like = {n: shrinker.tensor(n, x) for n, x in like.items() if n in known}
    return traced, values_of_buffers(traced.graph.buffers, like, 0)


def _candidates(traced: Traced, ranges: Mapping[str, InputRange]) -> Iterator[Fills]:
    """Yields fills by which a loss may ignore samples: all labels, or one mask."""
    labels = {
        name: field.holes[0]
        for name, field in ranges.items()
        if field.role == LABEL and field.holes
    }
    if labels:
        yield labels
    for v in traced.graph.inputs:
        known = ranges.get(v.name)
        if v.dtype.is_floating_point or (known is not None and known.role == MASK):
            yield {**labels, v.name: 0}


def _first_difference(
    short: Traced,
    longer: Traced,
    ranges: Mapping[str, InputRange],
    buffers: Mapping[str, Tensor],
    fills: Fills,
) -> str | None:
    """The first part of a step that changes when a batch is padded."""
    shapes = {v.name: tuple(v.shape) for v in longer.graph.inputs}
    kinds = {v.name: (v.shape, v.dtype) for v in short.graph.inputs}
    specs = {n: (v.shape, v.dtype) for n, v in longer.parameters.items()}
    for seed in range(DRAWS):
        weights = draw_parameters(specs, seed, buffers)
        batch = draw_batch(kinds, ranges, seed)
        padded = {**pad(batch, shapes, fills), **weights, **buffers}
        values = {**batch, **weights, **buffers, **short.literals}
        try:
            loss, grads, others = run_graph(short, values, None)
            results = run_graph(longer, {**padded, **longer.literals}, None)
        except (IndexError, RuntimeError, ValueError) as error:
            return str(error).partition("\n")[0]
        if not bool(loss.isfinite()):
            return "the loss is not finite"
        least = max(float(g.abs().max()) for g in grads.values()) * TOLERANCE
        for name, want in {"the loss": loss, **others}.items():
            have = results[0] if name == "the loss" else results[2][name]
            if not _same(have, want, TOLERANCE * float(want.abs().max())):
                return f"{name} is another one"
        for name, want in grads.items():
            if not _same(results[1][name], want, least):
                return f"the gradient of '{name}' is another one"
    return None


def _same(have: Tensor, want: Tensor, least: float) -> bool:
    return torch.allclose(have.double(), want.double(), rtol=TOLERANCE, atol=least)
